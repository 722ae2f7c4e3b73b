// A drawing at other costs, and what is held at a time. Costs: a rank's forward and backward of a micro-batch, a message,
// and `work`, by rank: how many times as long its instructions take.

// The costs of a drawing under unit costs; null where its times are other than those: measured, or with copies.
const costsOf = entry => {
  if (entry.unit || entry.copies) return null;
  const items = itemsOf(entry), own = items.filter(item => item.rank === 0 && item.stage === entry.stages[0][0] && item.mb === items[0].mb);
  const sum = letters => own.reduce((sum, item) => sum + (letters.includes(item.letter) ? item.end - item.start : 0), 0) * entry.stages[0].length;
  const first = items.find(item => item.stage === 1 && item.rank !== 0), by = first && items[first.by];
  return {forward: sum("F"), backward: sum("BIW"), message: by ? first.start - by.end : 0, work: []};
};

// Every rank keeps its order; an instruction starts when its rank is free and the message that it needs has come; a step
// of a replicated stage, after a reduction along a tree. This is the simulator's law, and a test compares the two.
const priced = (entry, from, to) => {
  if (JSON.stringify(from) === JSON.stringify(to)) return entry;
  const items = itemsOf(entry).map(item => ({...item})), last = Math.max(...entry.stages.flat()), made = {}, steps = {};
  const before = item => item.place ? items[entry.rows[item.line][item.place - 1]] : null;
  for (const item of items) if (item.letter === "S") (steps[`${item.stage}.${item.version}`] ??= []).push(item);
  const needs = item => {
    const same = item.letter === "S" ? steps[`${item.stage}.${item.version}`] : [];
    if (same.length > 1) return same.map(before);
    if (item.letter === "F" && item.stage) return [made[`F${item.stage - 1}.${item.mb}`]];
    return "BI".includes(item.letter) && item.stage < last ? [made[`B${item.stage + 1}.${item.mb}`]] : [];
  };
  const at = entry.rows.map(() => 0), done = new Set([null]);
  for (let moved = true; moved;) {
    moved = false;
    entry.rows.forEach((row, rank) => {
      for (; at[rank] < row.length; at[rank]++, moved = true) {
        const item = items[row[at[rank]]], needed = needs(item), by = before(item), start = by ? by.end : 0;
        if (!needed.every(other => done.has(other))) return;
        const factor = (to.work[rank] ?? 1) * ("FR".includes(item.letter) ? to.forward / from.forward : to.backward / from.backward);
        const length = (item.end - item.start) * factor;
        Object.assign(item, {start, why: by ? 1 : 0, by: by ? by.own : -1});
        for (const other of needed.filter(Boolean)) {
          const hops = item.letter === "S" ? 2 * Math.ceil(Math.log2(needed.length)) : other.rank !== rank ? 1 : 0, come = other.end + hops * to.message;
          if (come > item.start) Object.assign(item, {start: come, by: other.own, why: item.letter === "S" ? 3 : hops ? 2 : 1});
        }
        Object.assign(item, {wait: item.start - start, end: item.start + length});
        made[item.letter.replace("I", "B") + item.stage + "." + item.mb] = item;
        done.add(item);
      }
    });
  }
  const makespan = Math.max(...items.map(item => item.end)), bubble = bubbleAt(items, entry.p, makespan);
  return {...entry, items, lives: null, makespan, bubble, over: bubble / (1 - bubble)};
};

// The share of the ranks' time until then that they were idle.
const bubbleAt = (items, ranks, now) => 1 - items.reduce((sum, item) =>
  sum + (item.letter && item.letter !== "S" ? Math.max(Math.min(item.end, now) - item.start, 0) : 0), 0) / (now * ranks || 1);

// Micro-batches in flight on each rank: a forward, or its replay, saves tensors until the last backward of that stage.
const livesOf = entry => {
  const open = {};
  // The next pass over a program has the same micro-batches again.
  return entry.lives ??= itemsOf(entry).flatMap(item => {
    if (item.copy || item.letter === "S") return [];
    const key = `${item.rank} ${item.stage}.${item.mb}`, {start, end} = item;
    if ("BIW".includes(item.letter) && open[key]) open[key].end = end;
    else if (item.letter === "R" && open[key]) Object.assign(open[key], {start, end});
    else return [open[key] = {rank: item.rank, start, end}];
    return [];
  });
};
const heldAt = (entry, now) => {
  const held = entry.stages.map(() => 0);
  for (const life of livesOf(entry)) if (life.start <= now && now < life.end) held[life.rank] += 1 / entry.stages[life.rank].length;
  return held;
};
// The same over time, of one rank: [time, in flight from then on].
const heldOver = (entry, rank) => {
  const each = 1 / entry.stages[rank].length, changes = new Map();
  const add = (time, change) => changes.set(time, (changes.get(time) || 0) + change);
  for (const life of livesOf(entry)) if (life.rank === rank) { add(life.start, each); add(life.end, -each); }
  let held = 0;
  return [...changes].sort((a, b) => a[0] - b[0]).map(([time, change]) => [time, held += change]);
};
