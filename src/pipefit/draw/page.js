// --------------------------------------------------------------------------------------------------------- the page
const byId = id => document.getElementById(id);
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
}

byId("compare").addEventListener("click", () => compare(state.panels.length < 2));
byId("critical").addEventListener("click", () => critical(!state.critical));
byId("in").addEventListener("click", () => zoom(state.zoom * 1.5));
byId("out").addEventListener("click", () => zoom(state.zoom / 1.5));
byId("fit").addEventListener("click", () => zoom(1));
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === "+" || event.key === "=") zoom(state.zoom * 1.5);
  else if (event.key === "-") zoom(state.zoom / 1.5);
  else if (event.key === "0") zoom(1);
  else if (event.key === "c") critical(!state.critical);
});
addEventListener("resize", drawAll);
compare(byId("compare").getAttribute("aria-pressed") === "true");
