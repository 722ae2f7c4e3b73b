"use strict";
// What the page knows: the drawings, their instructions and copies, and how numbers and times are written.
const byId = id => document.getElementById(id);
const read = id => JSON.parse(byId(id).textContent);
const entries = read("data"), families = read("families");
const LETTERS = "FRBIWS", WHY = ["start", "rank", "message", "reduction", "copy", "lane"];
// What is moved, in the order of encode.py: its letter and its words; last a step on the host, which moves nothing.
const MOVED = [["w", "weights"], ["g", "gradients"], ["o", "optimizer states"], ["a", "activations"], ["a", "input"],
  ["S", "optimizer step"], ["a", "gradient"]];
const SVG = "http://www.w3.org/2000/svg";
const state = {zoom: 1, critical: false, memory: false, panels: [], now: Infinity, base: null, costs: null};

const el = (name, attributes, parent, text) => {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
};
const tag = (name, className, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

// -------------------------------------------------------------------------------------------------- numbers and words
const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
  : String(Number(value.toPrecision(4)));
// One unit for all drawings of the page.
const scaleOf = entry => {
  if (!entry.unit) return [1, ""];
  const longest = Math.max(entry.makespan, ...entries.filter(other => other.unit).map(other => other.makespan));
  for (const [limit, factor, name] of [[2e-6, 1e9, "ns"], [2e-3, 1e6, "µs"], [2, 1e3, "ms"]])
    if (longest < limit) return [factor, name];
  return [1, "s"];
};
const time = (entry, seconds) => {
  const [factor, unit] = scaleOf(entry);
  return number(seconds * factor) + (unit ? " " + unit : "");
};
const percent = share => (100 * share).toFixed(1) + " %";
const count = (many, word) => `${many} ${word}${many === 1 ? "" : "s"}`;
const ticks = (span, target) => {
  const raw = span / Math.max(target, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).reduce((a, b) => Math.abs(b - raw) < Math.abs(a - raw) ? b : a);
  const found = [];
  for (let i = 0; i * step <= span * (1 + 1e-9); i++) found.push(i * step);
  return found;
};
// "F0.3"; of a copy "w3", and "fetch w3" where it could be either.
const label = item => (item.copy ? MOVED[item.what][0] : item.letter) + item.stage + (item.mb >= 0 ? "." + item.mb : "");
const short = item => item.copy ? `${item.copy} ${label(item)}` : label(item);
const stagesWords = own => "stage" + (own.length > 1 ? "s " : " ")
  + (own.length > 4 ? `${own[0]}, ${own[1]} … ${own[own.length - 1]}` : own.join(", "));
// How far two drawings are from each other in one choice; without slots (0) nothing spills.
const apart = (one, other, key) => Math.abs(Math.log2(((one[key] || 0) + (key === "s")) / ((other[key] || 0) + (key === "s"))));
// One device that takes its stages in turn: there are no ranks to choose, and its chunks are the stages.
const lanesOf = entry => entry.lanes || [];
const isOneDevice = entry => Boolean(entry.s) && entry.p === 1;

// ---------------------------------------------------------------------------------- instructions, copies, slots, lanes
// As encode.py writes them: eight integers per instruction; nine per copy, which are counted after all instructions.
const itemsOf = entry => {
  if (entry.items) return entry.items;
  const items = [], rows = [];
  const add = (line, item) => {
    item.own = items.length;
    item.line = line;
    item.place = (rows[line] = rows[line] || []).push(item.own) - 1;
    items.push(item);
  };
  const lanes = 1 + lanesOf(entry).length;
  entry.ranks.forEach((row, rank) => {
    let end = 0;
    for (let at = 0; at < row.length; at += 8) {
      const [letter, chunk, mb, version, gap, length, why, back] = row.slice(at, at + 8);
      const start = end + gap;
      end = start + length;
      add(rank * lanes, {rank, letter: LETTERS[letter], chunk, mb, version, stage: entry.stages[rank][chunk],
        wait: gap * entry.tick, start: start * entry.tick, end: end * entry.tick, why, by: why ? items.length - back : -1});
    }
  });
  (entry.copies || []).forEach((row, rank) => {
    for (let at = 0; at < row.length; at += 9) {
      const [lane, what, stage, mb, start, length, wait, why, back] = row.slice(at, at + 9);
      add(rank * lanes + 1 + lane, {rank, copy: entry.lanes[lane], lane, what, stage, mb, wait: wait * entry.tick,
        start: start * entry.tick, end: (start + length) * entry.tick, why, by: why ? items.length - back : -1});
    }
  });
  entry.rows = Array.from(rows, row => row || []);
  return entry.items = items;
};
// The slots of each rank: what each is for, its number, and the stays of stages in it.
const slotsOf = entry => (entry.slots || []).map(own => own.map(([what, slot, ...row]) => {
  const stays = [];
  for (let at = 0; at < row.length; at += 3)
    stays.push({stage: row[at], start: row[at + 1] * entry.tick, end: (row[at + 1] + row[at + 2]) * entry.tick});
  const several = own.filter(other => other[0] === what).length > 1;
  const name = MOVED[what][0] === "w" ? `slot ${slot}` : several ? `states ${slot}` : "states";
  return {what, slot, stays, name};
}));
const chainOf = (items, from) => {
  const path = [];
  for (let at = from; at >= 0 && path.length <= items.length; at = items[at].by) path.push(at);
  return path;
};
const lastOf = items => items.reduce((best, item) => item.end >= items[best].end ? item.own : best, 0);
// The share of the copies' time in which their rank is at work: what spilling does not cost.
const hiddenShare = entry => {
  const items = itemsOf(entry), lanes = 1 + lanesOf(entry).length;
  let whole = 0, hidden = 0;
  entry.rows.forEach((row, line) => {
    if (line % lanes === 0 || entry.lanes[line % lanes - 1] === "host") return;
    const work = entry.rows[line - line % lanes];
    let at = 0;
    for (const copy of row.map(own => items[own])) {
      whole += copy.end - copy.start;
      while (at < work.length && items[work[at]].end <= copy.start) at++;
      for (let next = at; next < work.length && items[work[next]].start < copy.end; next++)
        hidden += Math.min(items[work[next]].end, copy.end) - Math.max(items[work[next]].start, copy.start);
    }
  });
  return whole ? hidden / whole : 1;
};
