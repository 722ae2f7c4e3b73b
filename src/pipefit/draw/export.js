// -------------------------------------------------------------------------------------- the drawings as files, and the link
const COPIED_STYLE = ["fill", "stroke", "stroke-width", "opacity", "font-size", "font-weight", "text-anchor", "dominant-baseline"];

// A copy of a drawing in which every element has its own colours, so that any viewer shows it.
function plainCopy(svg) {
  const made = svg.cloneNode(true), from = svg.querySelectorAll("*");
  made.querySelectorAll("*").forEach((part, at) => {
    const style = getComputedStyle(from[at]);
    for (const name of COPIED_STYLE) part.setAttribute(name, style.getPropertyValue(name));
    part.removeAttribute("class");
  });
  return made;
}

// All drawings of the page below each other, each with its title, the names of its rows and its figures.
function wholePicture() {
  const left = 96, right = 120, head = 46, ink = getComputedStyle(document.body).color, soft = getComputedStyle(byId("panels").querySelector("dt")).color;
  const widest = Math.max(...state.panels.map(panel => Number(panel.svg.getAttribute("width"))));
  const width = left + widest + right, all = el("svg", {xmlns: SVG, width, "font-family": "system-ui, sans-serif", "font-size": 12});
  el("rect", {width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor}, all);
  let top = 12;
  for (const panel of state.panels) {
    const entry = panel.entry, facts = [...panel.facts.children].map(item => `${item.firstChild.textContent} ${item.lastChild.textContent}`);
    el("text", {x: 12, y: top + 16, fill: ink, "font-size": 16, "font-weight": 650}, all,
      `${entry.name}: ${count(entry.p, "rank")}, ${entry.m} micro-batches` + (entry.v > 1 ? `, ${entry.v} chunks` : ""));
    el("text", {x: 12, y: top + 36, fill: soft}, all, facts.join(" · "));
    const inner = plainCopy(panel.svg);
    inner.setAttribute("x", left);
    inner.setAttribute("y", top + head);
    inner.setAttribute("class", "");
    all.append(inner);
    entry.stages.forEach((own, rank) => {
      const y = top + head + TOP + rank * panel.tall + CELL / 2 + 4;
      el("text", {x: left - 10, y, fill: ink, "text-anchor": "end"}, all, `rank ${rank}`);
      el("text", {x: left + widest + 12, y, fill: soft}, all, `in flight ${panel.peakWords(rank)}`);
    });
    top += head + Number(inner.getAttribute("height")) + 24;
  }
  all.setAttribute("height", top);
  all.setAttribute("viewBox", `0 0 ${width} ${top}`);
  return all;
}

const fileName = suffix => state.panels.map(panel => `${panel.entry.name}-p${panel.entry.p}-m${panel.entry.m}`).join("-and-") + suffix;

function save(blob, name) {
  const link = tag("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const svgText = () => new XMLSerializer().serializeToString(wholePicture());

// At twice its size in pixels; a browser has a limit of its own for very long drawings.
async function bitmap() {
  const image = new Image(), canvas = tag("canvas");
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svgText());
  await image.decode();
  const factor = Math.min(2, 16000 / image.width);
  canvas.width = image.width * factor;
  canvas.height = image.height * factor;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise(done => canvas.toBlob(done, "image/png"));
}

// The settings after the # of the address: a and b are the drawings, the rest is named as on the page.
const isEmbedded = parent !== self;
const addressOf = entry => [entry.name, ...KEYS.map(key => entry[key] || 0)].join(",");

function remember() {
  if (isEmbedded || !state.isReady) return;
  const found = new URLSearchParams();
  state.panels.forEach((panel, at) => found.set("ab"[at], addressOf(panel.stored)));
  for (const key of ["critical", "memory"]) if (state[key]) found.set(key, "1");
  for (const key of ["forward", "backward", "message"])
    if (state.costs && state.costs[key] !== state.base[key]) found.set(key, state.costs[key]);
  if (state.costs && state.costs.work.length) found.set("work", state.costs.work.join(","));
  history.replaceState(null, "", "#" + found);
}

function recall() {
  if (isEmbedded) return;
  const asked = new URLSearchParams(location.hash.slice(1));
  const find = key => entries.find(entry => addressOf(entry).toLowerCase() === (asked.get(key) || "").toLowerCase());
  for (const key of ["forward", "backward", "message", "work"]) if (asked.has(key)) byId(key).value = asked.get(key);
  if (state.base && ["forward", "backward", "message", "work"].some(key => asked.has(key))) charge();
  if (asked.has("a") && asked.has("b") !== state.panels.length > 1) compare(asked.has("b"));
  state.panels.forEach((panel, at) => { if (find("ab"[at])) panel.show(find("ab"[at])); });
  if (asked.has("memory")) memoryLane(true);
  if (asked.has("critical")) critical(true);
}
