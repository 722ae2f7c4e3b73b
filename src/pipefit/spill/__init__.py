"""Stages that live on another tier: records, slots, and the copies between them.

One rank has one `Spilling`, which owns everything else:

    Spilling (rank.py)                made by create.py; commits steps
    ├── stores: SpilledStore          one per spilled stage; takes the place of the stage's WeightStore
    │       parameters, gradients     views of slots while the stage is there      (stage_store.py, saved_places.py)
    │       └── states: MovedStates   the optimizer's states, views as well (optimizer_states.py)
    ├── arena: Arena                  the device's slots, allocated once           (arena.py)
    ├── parked: ParkedTensors         activations that wait on the tier            (parked.py)
    ├── tier: TierStore               records by `Key`, each with a version        (tiers.py)
    │       HostTier                  in pinned memory                             (host.py)
    │       DiskTier                  in a file, with checksums and commits        (disk.py, tier_file.py, records.py)
    │       SplitTier                 a HostTier for records that fit, a DiskTier  (split_tier.py)
    └── lanes: Lanes                  threads that copy: read, write, host steps   (lanes.py)

A `fetch` starts `tier.read` from a record into a slot, an `evict` starts `tier.write` back; each returns a `Copy` that
whoever needs the record, or the slot, waits for.
"""
