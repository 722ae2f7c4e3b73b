"""Stages that are kept on another tier: records, slots, and the copies between them.

One rank has one `Spilling`, which owns everything else:

    Spilling (rank.py)                moves stages to the tier; commits steps
    ├── stores: SpilledStore          one per spilled stage; a Store like the others
    │       parameters, gradients     views of slots while the stage is there        (stage_store.py)
    │       └── states: MovedStates   the optimizer's states, views as well          (optimizer_states.py)
    ├── arena: Arena                  the device's slots, allocated once             (arena.py)
    ├── parked, resident              other tensors that wait on the tier, or are committed with it  (parked.py)
    └── tier: TierStore               records by `Key`, each with a version, in memory or in a file  (tier_store.py)
            ├── files: TierFile       the file, and its commits with checksums       (tier_file.py)
            └── lanes: Lanes          threads that copy: read, write, host steps     (lanes.py)

A `fetch` starts `tier.read` from a record into a slot, an `evict` starts `tier.write` back. Each returns a `Copy`; code
that needs the record, or the slot, joins it: on a GPU the stream waits, not the host.
"""
