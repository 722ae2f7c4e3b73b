"use strict";
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const entries = read("data"), families = read("families");
  const LETTERS = "FRBIWS", WHY = ["start", "rank", "message", "reduction", "copy"];
  const ROW = 34, CELL = 28, TOP = 22, SVG = "http://www.w3.org/2000/svg";
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

  // ------------------------------------------------------------------------------------------------ numbers and words
  const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
    : String(Number(value.toPrecision(4)));
  const scaleOf = entry => {
    if (!entry.unit) return [1, ""];
    for (const [limit, factor, name] of [[2e-6, 1e9, "ns"], [2e-3, 1e6, "µs"], [2, 1e3, "ms"]])
      if (entry.makespan < limit) return [factor, name];
    return [1, "s"];
  };
  const time = (entry, seconds) => {
    const [factor, unit] = scaleOf(entry);
    return number(seconds * factor) + (unit ? " " + unit : "");
  };
  const percent = share => (100 * share).toFixed(1) + " %";
  const short = box => box.letter + box.stage + (box.mb >= 0 ? "." + box.mb : "");
  const ticks = (span, target) => {
    const raw = span / Math.max(target, 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(f => f * power).reduce((a, b) => Math.abs(b - raw) < Math.abs(a - raw) ? b : a);
    const found = [];
    for (let i = 0; i * step <= span * (1 + 1e-9); i++) found.push(i * step);
    return found;
  };

  // Eight integers per box, as encode.py writes them.
  const boxesOf = entry => {
    if (entry.boxes) return entry.boxes;
    const boxes = [];
    entry.first = [];
    entry.ranks.forEach((row, rank) => {
      entry.first.push(boxes.length);
      let end = 0;
      for (let at = 0; at < row.length; at += 8) {
        const [letter, chunk, mb, version, gap, length, why, back] = row.slice(at, at + 8);
        const start = end + gap, own = boxes.length;
        end = start + length;
        boxes.push({rank, letter: LETTERS[letter], chunk, mb, version, stage: entry.stages[rank][chunk], wait: gap * entry.tick,
          start: start * entry.tick, end: end * entry.tick, why, by: why ? own - back : -1, own});
      }
    });
    entry.first.push(boxes.length);
    return entry.boxes = boxes;
  };
  const chainOf = (boxes, from) => {
    const path = [];
    for (let at = from; at >= 0 && path.length <= boxes.length; at = boxes[at].by) path.push(at);
    return path;
  };
  const lastOf = boxes => boxes.reduce((best, box) => box.end >= boxes[best].end ? box.own : best, 0);

  // -------------------------------------------------------------------------------------------------------- one panel
  const state = {zoom: 1, critical: false, panels: []};

  class Panel {
    constructor(index) {
      this.node = document.getElementById("panel").content.firstElementChild.cloneNode(true);
      for (const name of ["choices", "facts", "names", "scroll", "memory", "legend", "detail", "picture"])
        this[name] = this.node.querySelector("." + name);
      this.selected = -1;
      this.kept = false;
      this.choices.addEventListener("change", event => this.choose(event.target.name));
      this.scroll.addEventListener("keydown", event => this.key(event));
      this.scroll.addEventListener("pointerover", event => this.point(event));
      this.scroll.addEventListener("pointerleave", () => { if (!this.kept) this.select(-1); });
      this.scroll.addEventListener("click", event => this.click(event));
      this.scroll.addEventListener("scroll", () => {
        for (const other of state.panels) if (other !== this) other.scroll.scrollLeft = this.scroll.scrollLeft;
      });
      this.scroll.addEventListener("wheel", event => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        zoom(state.zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2), event.clientX - this.scroll.getBoundingClientRect().left);
      }, {passive: false});
      this.show(index ? besides(state.panels[0].entry) : entries[0]);
    }

    // Of all entries, the one nearest to the choices; what was chosen last weighs most.
    choose(changed) {
      const wanted = {name: this.choices.elements.name.value};
      for (const key of "pmv") wanted[key] = Number(this.choices.elements[key].value);
      const distance = entry => {
        let sum = entry.name === wanted.name ? 0 : 1e6;
        for (const key of "pmv")
          sum += Math.abs(Math.log2(entry[key] / wanted[key])) * (key === changed ? 1e3 : key === "p" ? 10 : 1);
        return sum;
      };
      this.show(entries.reduce((best, entry) => distance(entry) < distance(best) ? entry : best));
    }

    show(entry) {
      this.entry = entry;
      this.boxes = boxesOf(entry);
      this.selected = -1;
      this.kept = false;
      this.fillChoices();
      this.fillFacts();
      this.fillSides();
      this.fillLegend();
      if (!this.node.isConnected) return;
      drawAll();
      this.describe();
    }

    fillChoices() {
      const own = entries.filter(entry => entry.name === this.entry.name);
      const values = {name: [...new Set(entries.map(entry => entry.name))]};
      for (const key of "pmv") values[key] = [...new Set(own.map(entry => entry[key]))].sort((a, b) => a - b);
      for (const key in values) {
        const select = this.choices.elements[key];
        select.replaceChildren(...values[key].map(value => {
          const option = tag("option", "", String(value));
          option.value = value;
          option.selected = value === this.entry[key];
          return option;
        }));
        select.disabled = values[key].length < 2;
      }
    }

    fillFacts() {
      const entry = this.entry, peak = Math.max(...entry.peak), weights = Math.max(...entry.weights);
      // With nothing to choose, the shape is a fact among the others.
      this.choices.hidden = entries.length < 2;
      const shape = entries.length < 2 ? [["ranks", String(entry.p)], ["micro-batches", String(entry.m)]] : [];
      if (shape.length && entry.v > 1) shape.push(["chunks", String(entry.v)]);
      const facts = [...shape, ["bubble", percent(entry.bubble)], ["over ideal", percent(entry.over)],
        ["makespan", time(entry, entry.makespan)], ["peak in flight", number(peak)],
        ["weight versions", String(weights)], ["messages", number(entry.messages)]];
      if (entry.steps > 1) facts.push(["updates", String(entry.steps)]);
      facts.push(["times", entry.source]);
      this.facts.replaceChildren(...facts.map(([name, value]) => {
        const item = document.createElement("div");
        item.append(tag("dt", "", name), tag("dd", "", value));
        return item;
      }));
      const words = `${entry.name}, ${entry.p} ranks, ${entry.m} micro-batches`;
      this.scroll.setAttribute("aria-label", words + ": arrow keys move between instructions");
    }

    fillSides() {
      const entry = this.entry, highest = Math.max(...entry.peak) || 1, several = Math.max(...entry.weights) > 1;
      const plain = entry.stages.every((own, rank) => own.length === 1 && own[0] === rank);
      this.names.replaceChildren(...entry.stages.map((own, rank) => {
        const item = tag("div", "", `rank ${rank}`);
        if (!plain) item.append(tag("small", "", `stage${own.length > 1 ? "s" : ""} ${own.join(", ")}`));
        return item;
      }));
      this.memory.dataset.head = "peak in flight" + (several ? ", weights" : "") + (entry.bytes.length ? ", memory" : "");
      this.memory.replaceChildren(...entry.peak.map((peak, rank) => {
        const item = tag("div"), track = tag("i"), bar = tag("b");
        bar.style.width = 100 * peak / highest + "%";
        track.append(bar);
        item.append(track, tag("span", "", number(peak)));
        const held = entry.weights[rank];
        if (several) item.append(tag("em", "", held + (held > 1 ? " versions" : " version")));
        if (entry.bytes.length) item.append(tag("em", "", entry.bytes[rank]));
        return item;
      }));
    }

    fillLegend() {
      const used = new Set(this.boxes.map(box => box.letter));
      const items = [...LETTERS].filter(letter => used.has(letter)).map(letter => [letter, families[letter]]);
      this.legend.className = "legend chunks-" + this.entry.v;
      this.legend.replaceChildren(...[...items, ["lane", "idle"]].map(([letter, words]) => {
        const many = letter === "lane" || letter === "S" ? 1 : this.entry.v, item = tag("span");
        const wide = many > 1 ? 10 : 14, swatch = el("svg", {width: (wide + 1) * many - 1, height: 12});
        for (let chunk = 0; chunk < many; chunk++)
          el("rect", {class: letter === "lane" ? "lane" : letter + chunk, x: chunk * (wide + 1), width: wide, height: 12, rx: 2}, swatch);
        item.append(swatch, words + (many > 1 ? `, chunk 0 to ${many - 1}` : ""));
        return item;
      }));
      this.legend.append(tag("span", "", "number: micro-batch" + (this.entry.versioned ? ", w: weight version" : "")));
    }

    // Pixels per second: the same in both panels, so that lengths compare.
    draw() {
      const room = Math.max(Math.min(...state.panels.map(panel => panel.scroll.clientWidth || 900)), 200) - 2;
      const longest = Math.max(...state.panels.map(panel => panel.entry.unit === this.entry.unit ? panel.entry.makespan : 0),
        this.entry.makespan) || 1;
      const scale = this.scale = room * state.zoom / longest;
      const ranks = this.entry.stages.length, height = TOP + ranks * ROW + 4;
      const width = Math.max(this.entry.makespan * scale, 10) + 2;
      const svg = el("svg", {width, height, class: "chunks-" + this.entry.v});
      const [factor] = scaleOf(this.entry);
      for (const tick of ticks(this.entry.makespan * factor, Math.max(width / 100, 2))) {
        const x = tick / factor * scale;
        el("path", {class: "hair", d: `M${x.toFixed(1)} ${TOP - 4}V${height}`}, svg);
        if (x < width - 14)
          el("text", {class: "tick", x: Math.max(x, 4).toFixed(1), y: 12}, svg, number(tick));
      }
      for (let rank = 0; rank < ranks; rank++)
        el("rect", {class: "lane", x: 0, y: TOP + rank * ROW, width: width - 2, height: CELL, rx: 3}, svg);
      this.cells = this.boxes.map(box => this.cell(box, svg, scale));
      this.chain = el("path", {class: "chain"}, svg);
      this.scroll.replaceChildren(svg);
      this.svg = svg;
      this.mark();
    }

    cell(box, svg, scale) {
      const x = box.start * scale, width = (box.end - box.start) * scale, y = TOP + box.rank * ROW;
      if (box.letter === "S") {
        const rect = el("rect", {class: "cell S0", x: width < 2.6 ? x - .8 : x + .5, y: y - 2, width: Math.max(width - 1, 1.6), height: CELL + 4}, svg);
        rect.own = box.own;
        return [rect];
      }
      const inset = width > 3 ? .5 : Math.min(.12 * width, .5);
      const rect = el("rect", {class: `cell ${box.letter}${box.chunk}`, x: (x + inset).toFixed(2), y,
        width: Math.max(width - 2 * inset, .3).toFixed(2), height: CELL, rx: width > 7 ? 2 : width > 4 ? 1 : 0}, svg);
      rect.own = box.own;
      const made = [rect], label = String(box.mb), size = Math.min((width - 2) / (.6 * label.length), 11);
      if (size < 6.5) return made;
      const middle = (x + width / 2).toFixed(2), below = "w" + box.version;
      const small = Math.min((width - 2) / (.62 * below.length), 8), two = this.entry.versioned && small >= 6.2;
      made.push(el("text", {class: "n t" + box.letter, x: middle, y: y + (two ? 10 : CELL / 2), "font-size": size.toFixed(1)}, svg, label));
      if (two)
        made.push(el("text", {class: "n t" + box.letter, x: middle, y: y + 21, "font-size": small.toFixed(1)}, svg, below));
      return made;
    }

    // ------------------------------------------------------------------------------------------------- what is marked
    point(event) {
      if (event.target.own !== undefined && !this.kept) this.select(event.target.own);
    }

    click(event) {
      const own = event.target.own;
      this.kept = own !== undefined && !(this.kept && own === this.selected);
      this.select(own === undefined ? -1 : own);
    }

    select(own) {
      this.selected = own;
      this.mark();
      this.describe();
    }

    mark() {
      const at = this.selected >= 0 ? this.selected : state.critical ? lastOf(this.boxes) : -1;
      const chain = at >= 0 ? chainOf(this.boxes, at) : [], on = new Set(chain);
      this.svg.classList.toggle("dimmed", at >= 0);
      this.cells.forEach((parts, own) => parts.forEach((part, place) => {
        part.classList.toggle("on", on.has(own));
        if (!place) part.classList.toggle("at", own === this.selected);
      }));
      const middle = box => TOP + box.rank * ROW + CELL / 2;
      let d = "";
      for (const own of chain) {
        const box = this.boxes[own], by = this.boxes[box.by];
        if (by && by.rank !== box.rank) {
          const from = by.end * this.scale, to = box.start * this.scale, down = box.rank > by.rank ? 1 : -1;
          d += `M${from.toFixed(1)} ${middle(by) + down * CELL / 2}L${to.toFixed(1)} ${middle(box) - down * CELL / 2}`;
        }
      }
      this.chain.setAttribute("d", d);
    }

    describe() {
      const box = this.boxes[this.selected], entry = this.entry;
      if (!box) {
        const path = chainOf(this.boxes, lastOf(this.boxes));
        const crossings = path.filter(own => this.boxes[own].why === 2).length;
        this.detail.textContent = state.critical
          ? `Critical path: ${path.length} instructions and ${crossings} messages decide the makespan.`
          : "Rest on an instruction, or step through them with the arrow keys.";
        return;
      }
      const what = tag("b", "", short(box));
      const batch = box.mb >= 0 ? `, micro-batch ${box.mb}` : "";
      const rest = ` ${families[box.letter]} of stage ${box.stage}${batch}, with weights ${box.version}, on rank ${box.rank}: `
        + `${time(entry, box.start)} to ${time(entry, box.end)} (${time(entry, box.end - box.start)}). `;
      this.detail.replaceChildren(what, rest, tag("span", "why", this.why(box)));
    }

    why(box) {
      const by = this.boxes[box.by], idle = box.wait > 1e-9 * this.entry.makespan;
      const waited = idle ? `The rank stood idle for ${time(this.entry, box.wait)}` : "It started at once";
      if (!by) return waited + ": nothing came before it.";
      const sender = `${short(by)} on rank ${by.rank}`, kind = WHY[box.why];
      if (kind === "message") return `${waited}: it waited for the message of ${sender}.`;
      if (kind === "reduction") return `${waited}: it waited for the reduction after ${sender}.`;
      if (kind === "copy") return `${waited}: it waited for a copy after ${sender}.`;
      return idle ? `${waited} after ${short(by)}.` : `It started as soon as the rank had finished ${short(by)}.`;
    }

    // -------------------------------------------------------------------------------------------------------- the keys
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const box = this.boxes[this.selected], first = this.entry.first;
      let next;
      if (event.key === "ArrowRight") next = box ? Math.min(box.own + 1, first[box.rank + 1] - 1) : 0;
      else if (event.key === "ArrowLeft") next = box ? Math.max(box.own - 1, first[box.rank]) : 0;
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = box ? this.beside(box, event.key === "ArrowDown" ? 1 : -1) : 0;
      else if (event.key === "Enter") next = box && box.by >= 0 ? box.by : this.selected;
      else if (event.key === "Home") next = box ? first[box.rank] : 0;
      else if (event.key === "End") next = box ? first[box.rank + 1] - 1 : this.boxes.length - 1;
      else if (event.key === "Escape") next = -1;
      else return;
      event.preventDefault();
      this.kept = next >= 0;
      this.select(next);
      if (next >= 0) this.reveal(this.boxes[next]);
    }

    beside(box, step) {
      const rank = box.rank + step;
      if (rank < 0 || rank >= this.entry.stages.length) return box.own;
      const row = this.boxes.slice(this.entry.first[rank], this.entry.first[rank + 1]);
      const far = other => Math.abs(other.start + other.end - box.start - box.end);
      return row.length ? row.reduce((best, other) => far(other) < far(best) ? other : best).own : box.own;
    }

    reveal(box) {
      const left = box.start * this.scale, right = box.end * this.scale, view = this.scroll;
      if (left < view.scrollLeft) view.scrollLeft = left - 40;
      else if (right > view.scrollLeft + view.clientWidth) view.scrollLeft = right - view.clientWidth + 40;
    }
  }

  // --------------------------------------------------------------------------------------------------------- the page
  const byId = id => document.getElementById(id);
  const drawAll = () => state.panels.forEach(panel => panel.draw());

  function zoom(wanted, anchor) {
    const before = state.zoom, view = state.panels[0].scroll;
    state.zoom = Math.min(Math.max(wanted, 1), 64);
    const panel = state.panels.find(panel => panel.selected >= 0), box = panel && panel.boxes[panel.selected];
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
      + ["p", "m", "v"].reduce((sum, key) => sum + Math.abs(Math.log2(other[key] / entry[key])), 0);
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
})();
