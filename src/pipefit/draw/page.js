// --------------------------------------------------------------------------------------------------------- the page
const drawAll = () => state.panels.forEach(panel => panel.draw());

function zoom(wanted, anchor) {
  const before = state.zoom, view = state.panels[0].scroll;
  state.zoom = Math.min(Math.max(wanted, 1), 64);
  const panel = state.panels.find(panel => panel.selected >= 0), box = panel && panel.items[panel.selected];
  const middle = box ? box.start * panel.scale - view.scrollLeft : view.clientWidth / 2;
  const at = anchor === undefined ? middle : anchor;
  const left = (view.scrollLeft + at) * state.zoom / before - at;
  drawAll();
  for (const panel of state.panels) panel.scroll.scrollLeft = left;
}

function compare(two) {
  byId("compare").setAttribute("aria-pressed", String(two));
  while (state.panels.length > (two ? 2 : 1)) state.panels.pop().node.remove();
  while (state.panels.length < (two ? 2 : 1)) addPanel(state.panels.length);
  drawAll();
  remember();
}

// What to set beside a drawing: another schedule of the same shape, or the nearest there is.
function besides(entry) {
  const far = other => (other === entry ? 1e6 : 0) + (other.name === entry.name ? 1e3 : 0)
    + KEYS.reduce((sum, key) => sum + apart(other, entry, key), 0);
  return entries.reduce((best, other) => far(other) < far(best) ? other : best);
}

function addPanel(index) {
  const panel = new Panel(index);
  state.panels.push(panel);
  byId("panels").append(panel.node);
  panel.draw();
  panel.describe();
}

function critical(on) {
  state.critical = on;
  byId("critical").setAttribute("aria-pressed", String(on));
  for (const panel of state.panels) panel.select(panel.selected);
  remember();
}

function memoryLane(on) {
  state.memory = on;
  byId("memory").setAttribute("aria-pressed", String(on));
  for (const panel of state.panels) panel.show(panel.stored);
}

byId("compare").addEventListener("click", () => compare(state.panels.length < 2));
byId("critical").addEventListener("click", () => critical(!state.critical));
byId("memory").addEventListener("click", () => memoryLane(!state.memory));
byId("svg").addEventListener("click", () => save(new Blob([svgText()], {type: "image/svg+xml"}), fileName(".svg")));
byId("png").addEventListener("click", async () => save(await bitmap(), fileName(".png")));
byId("in").addEventListener("click", () => zoom(state.zoom * 1.5));
byId("out").addEventListener("click", () => zoom(state.zoom / 1.5));
byId("fit").addEventListener("click", () => zoom(1));
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
  if (event.key === "+" || event.key === "=") zoom(state.zoom * 1.5);
  else if (event.key === "-") zoom(state.zoom / 1.5);
  else if (event.key === "0") zoom(1);
  else if (event.key === "c") critical(!state.critical);
  else if (event.key === "m") memoryLane(!state.memory);
});
// --------------------------------------------------------------------------------------------------- time and costs
let playing = 0;
const longest = () => Math.max(...state.panels.map(panel => panel.entry.makespan));

function moveTo(now) {
  state.now = now < longest() ? Math.max(now, 0) : Infinity;
  byId("now").value = 1000 * Math.min(state.now / longest(), 1);
  for (const panel of state.panels) panel.at(state.now);
}

function play(on) {
  cancelAnimationFrame(playing);
  byId("play").textContent = on ? "Pause" : "Play";
  playing = 0;
  if (!on) return;
  if (state.now === Infinity) moveTo(0);
  let before = performance.now();
  const frame = time => {
    // One forward takes a third of a second, and the whole at most half a minute.
    const each = state.panels[0].items[0], speed = Math.max((each.end - each.start) * 3, longest() / 30);
    moveTo(state.now + speed * (time - before) / 1000);
    before = time;
    playing = state.now === Infinity ? play(false) || 0 : requestAnimationFrame(frame);
  };
  playing = requestAnimationFrame(frame);
}

// To the next time, or the one before, at which an instruction starts.
function step(ahead) {
  play(false);
  const times = state.panels.flatMap(panel => panel.items.map(item => item.start)), now = state.now < longest() ? state.now : ahead ? -1 : longest();
  const far = 1e-6 * longest();
  moveTo(ahead ? Math.min(...times.filter(time => time > now + far), Infinity) : Math.max(...times.filter(time => time < now - far), 0));
}

function charge() {
  const read = id => { const value = byId(id).valueAsNumber; return value >= 0 && value < 1e6 ? value : state.base[id]; };
  const work = byId("work").value.split(/[\s,;]+/).filter(Boolean).map(Number).map(share => share > 0 && share < 1e6 ? share : 1);
  state.costs = {forward: read("forward") || state.base.forward, backward: read("backward") || state.base.backward, message: read("message"), work};
  for (const panel of state.panels) panel.show(panel.stored);
  moveTo(Infinity);
}

byId("play").addEventListener("click", () => play(!playing));
byId("back").addEventListener("click", () => step(false));
byId("next").addEventListener("click", () => step(true));
byId("now").addEventListener("input", event => { play(false); moveTo(event.target.value / 1000 * longest()); });
state.base = costsOf(entries[0]);
byId("costs").hidden = !state.base;
for (const key of ["forward", "backward", "message"]) if (state.base) byId(key).value = Number(state.base[key].toPrecision(6));
byId("costs").addEventListener("input", charge);
addEventListener("resize", drawAll);
compare(byId("compare").getAttribute("aria-pressed") === "true");
recall();
state.isReady = true;

// Within a page of a manual: without heading and help, and as high as the drawing needs.
if (isEmbedded) {
  document.documentElement.className = "embedded";
  new ResizeObserver(() => parent.postMessage({height: document.documentElement.offsetHeight}, "*")).observe(document.body);
}
