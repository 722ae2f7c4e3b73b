// One drawing on the page: its choices, figures, picture and what is told of an item.
const CELL = 28, GAP = 6, TOP = 22, LANE = 13, SLOT = 11, HELD = 22;
const KEYS = ["p", "m", "v", "s"];

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
    this.show(index ? besides(state.panels[0].stored) : entries[0]);
  }

  // Of all entries, the one nearest to the choices; what was chosen last weighs most.
  choose(changed) {
    const wanted = {name: this.choices.elements.name.value};
    for (const key of KEYS) wanted[key] = Number(this.choices.elements[key].value);
    const distance = entry => {
      let sum = entry.name === wanted.name ? 0 : 1e6;
      for (const key of KEYS) sum += apart(entry, wanted, key) * (key === changed ? 1e3 : key === "p" ? 10 : 1);
      return sum;
    };
    this.show(entries.reduce((best, entry) => distance(entry) < distance(best) ? entry : best));
  }

  show(stored) {
    this.stored = stored;
    const entry = this.entry = state.costs && costsOf(stored) ? priced(stored, state.base, state.costs) : stored;
    this.items = itemsOf(entry);
    this.slots = slotsOf(entry);
    // Below a rank's cells lie its lanes of copies, and below those what is in each slot.
    this.tall = CELL + GAP + (entry.copies ? 4 + entry.lanes.length * LANE + 3 + Math.max(0, ...this.slots.map(own => own.length)) * SLOT + 6 : 0);
    this.heldTop = this.tall - GAP + 2;
    if (state.memory) this.tall += HELD;
    this.selected = -1;
    this.kept = false;
    this.fillChoices();
    this.fillFacts();
    this.fillSides();
    this.fillLegend();
    if (!this.node.isConnected) return;
    drawAll();
    this.describe();
    remember();
  }

  fillChoices() {
    const own = entries.filter(entry => entry.name === this.entry.name);
    const values = {name: [...new Set(entries.map(entry => entry.name))]};
    for (const key of KEYS) values[key] = [...new Set(own.map(entry => entry[key] || 0))].sort((a, b) => a - b);
    for (const key in values) {
      const select = this.choices.elements[key];
      select.replaceChildren(...values[key].map(value => {
        const option = tag("option", "", key === "s" && !value ? "all stay" : String(value));
        option.value = value;
        option.selected = value === (this.entry[key] || 0);
        return option;
      }));
      select.disabled = values[key].length < 2;
    }
    const one = isOneDevice(this.entry);
    this.choices.elements.v.previousSibling.textContent = one ? "stages " : "v, chunks ";
    this.choices.elements.v.parentNode.classList.toggle("early", one);
    this.choices.elements.p.parentNode.hidden = one;
    this.choices.elements.s.parentNode.hidden = entries.every(entry => !entry.s);
  }

  fillFacts() {
    const entry = this.entry, peak = Math.max(...entry.peak), weights = Math.max(...entry.weights);
    const one = isOneDevice(entry), copies = this.items.filter(item => item.copy && item.copy !== "host").length;
    // With nothing to choose, the shape is a fact among the others.
    this.choices.hidden = entries.length < 2;
    const shape = entries.length < 2 ? [[one ? "stages" : "ranks", String(one ? entry.v : entry.p)], ["micro-batches", String(entry.m)]] : [];
    if (shape.length && entry.v > 1 && !one) shape.push(["chunks", String(entry.v)]);
    if (shape.length && entry.s) shape.push(["slots", String(entry.s)]);
    const facts = [...shape, ["bubble", percent(entry.bubble)], ["over ideal", percent(entry.over)],
      ["makespan", time(entry, entry.makespan)], ["peak in flight", number(peak)]];
    if (entry.kept) facts.push(["inputs kept", String(Math.max(...entry.kept))]);
    if (entry.s) facts.push([`copies, ${entry.tier}`, number(copies)], ["copies behind work", percent(hiddenShare(entry))]);
    else facts.push(["weight versions", String(weights)]);
    if (entry.messages || !entry.s) facts.push(["messages", number(entry.messages)]);
    if (entry.steps > 1) facts.push(["updates", String(entry.steps)]);
    facts.push(["times", entry.source]);
    this.facts.replaceChildren(...facts.map(([name, value]) => {
      const item = document.createElement("div");
      item.append(tag("dt", "", name), tag("dd", "", value));
      return item;
    }));
    const words = `${entry.name}, ${one ? count(entry.v, "stage") : count(entry.p, "rank")}, ${count(entry.m, "micro-batch")}`;
    this.scroll.setAttribute("aria-label", words.replace("batchs", "batches") + ": arrow keys move between instructions");
  }

  fillSides() {
    const entry = this.entry, highest = Math.max(...entry.peak) || 1, several = Math.max(...entry.weights) > 1;
    const plain = entry.stages.every((own, rank) => own.length === 1 && own[0] === rank);
    this.names.replaceChildren(...entry.stages.map((own, rank) => {
      const item = tag("div", "rank"), words = tag("span", "", `rank ${rank}`);
      item.style.height = this.tall + "px";
      if (!plain) words.append(tag("small", "", stagesWords(own)));
      item.append(words);
      for (const lane of lanesOf(entry)) item.append(tag("em", "", lane));
      (this.slots[rank] || []).forEach((slot, place) => item.append(tag("em", place ? "slot" : "slot first", slot.name)));
      if (state.memory) item.append(tag("em", "held", "in flight"));
      return item;
    }));
    this.memory.dataset.peak = (entry.kept ? "in flight + inputs" : "peak in flight") + (several ? ", weights" : "") + (entry.bytes.length ? ", memory" : "");
    this.memory.replaceChildren(...entry.peak.map((peak, rank) => {
      const item = tag("div", "rank"), first = tag("div"), track = tag("i"), bar = tag("b");
      item.style.height = this.tall + "px";
      bar.style.width = 100 * peak / highest + "%";
      track.append(bar);
      first.append(track, tag("span", "", this.peakWords(rank)));
      const held = entry.weights[rank];
      if (several) first.append(tag("em", "", held + (held > 1 ? " versions" : " version")));
      if (entry.bytes.length) first.append(tag("em", "", entry.bytes[rank]));
      item.append(first);
      const own = entry.stages[rank].length;
      if (entry.s) item.append(tag("small", "", `${Math.min(entry.s, own)} of ${count(own, "stage")}`), tag("small", "", "on the device"));
      return item;
    }));
  }

  peakWords(rank) {
    return number(this.entry.peak[rank]) + (this.entry.kept && this.entry.kept[rank] ? ` + ${this.entry.kept[rank]}` : "");
  }

  fillLegend() {
    const used = new Set(this.items.map(item => item.letter)), one = isOneDevice(this.entry);
    const items = [...LETTERS].filter(letter => used.has(letter)).map(letter => [letter, families[letter]]);
    items.push(...lanesOf(this.entry).map(lane => [lane, lane === "host" ? "step on the host" : lane]));
    this.legend.className = "legend chunks-" + this.entry.v;
    this.legend.replaceChildren(...[...items, ["lane", "idle"]].map(([letter, words]) => {
      const many = letter.length > 1 || letter === "S" ? 1 : this.entry.v, item = tag("span");
      const gap = many > 6 ? 0 : 1, wide = many > 6 ? Math.max(64 / many, 2) : many > 1 ? 10 : 14;
      const swatch = el("svg", {width: (wide + gap) * many - gap, height: 12});
      for (let chunk = 0; chunk < many; chunk++)
        el("rect", {class: letter.length > 1 ? letter : letter + chunk, x: chunk * (wide + gap), width: wide, height: 12, rx: gap * 2}, swatch);
      item.append(swatch, words + (many > 1 ? `, ${one ? "stage" : "chunk"} 0 to ${many - 1}` : ""));
      return item;
    }));
    this.legend.append(tag("span", "", "number: micro-batch" + (this.entry.versioned ? ", w: weight version" : "")));
    const moved = new Map(this.items.filter(item => item.copy && item.copy !== "host").map(item => MOVED[item.what]));
    if (moved.size) this.legend.append(tag("span", "", "copies: " + [...moved].map(pair => pair.join(" ")).join(", ") + " of a stage"));
  }

  // Pixels per second: the same in both panels, so that lengths compare.
  draw() {
    const room = Math.max(Math.min(...state.panels.map(panel => panel.scroll.clientWidth || 900)), 200) - 2;
    const longest = Math.max(...state.panels.map(panel => panel.entry.unit === this.entry.unit ? panel.entry.makespan : 0),
      this.entry.makespan) || 1;
    // In a narrow window a forward keeps room for its number, and the drawing scrolls.
    const forwards = this.items.filter(item => item.letter === "F").map(item => item.end - item.start), digits = String(this.entry.m - 1).length;
    const least = innerWidth <= 700 ? Math.min((4.8 * digits + 2.4) / Math.min(...forwards), 12 * room / longest) : 0;
    const scale = this.scale = Math.max(room / longest, least) * state.zoom;
    const ranks = this.entry.stages.length, height = TOP + ranks * this.tall + 4;
    const width = Math.max(this.entry.makespan * scale, 10) + 2;
    const svg = el("svg", {width, height, class: "chunks-" + this.entry.v});
    const [factor, unit] = scaleOf(this.entry);
    for (const tick of ticks(this.entry.makespan * factor, Math.max(width / 100, 2))) {
      const x = tick / factor * scale;
      el("path", {class: "hair", d: `M${x.toFixed(1)} ${TOP - 4}V${height}`}, svg);
      if (x < width - 14)
        el("text", {class: tick ? "tick" : "tick zero", x: x.toFixed(1), y: 12}, svg, number(tick) + (unit && ` ${unit}`));
    }
    for (let rank = 0; rank < ranks; rank++) {
      el("rect", {class: "lane", x: 0, y: TOP + rank * this.tall, width: width - 2, height: CELL, rx: 3}, svg);
      lanesOf(this.entry).forEach((copy, lane) =>
        el("rect", {class: "lane", x: 0, y: this.top({rank, copy, lane}), width: width - 2, height: LANE - 2, rx: 2}, svg));
      (this.slots[rank] || []).forEach((slot, place) => this.stays(rank, slot, place, svg, scale));
      if (state.memory) this.held(rank, svg, scale);
    }
    this.cells = this.items.map(item => item.copy ? this.bar(item, svg, scale) : this.cell(item, svg, scale));
    this.chain = el("path", {class: "chain"}, svg);
    this.cursor = el("path", {class: "cursor"}, svg);
    this.scroll.replaceChildren(svg);
    this.svg = svg;
    this.mark();
    this.at(state.now);
  }

  // What has happened at a time: later items fade, the bars show what is in flight; at the end, the peak.
  at(now) {
    const entry = this.entry, x = now * this.scale, view = this.scroll, whole = !(now < entry.makespan), held = whole ? entry.peak : heldAt(entry, now);
    this.cells.forEach((parts, own) => parts.forEach(part => part.classList.toggle("later", this.items[own].start > now)));
    this.cursor.setAttribute("d", whole ? "" : `M${x.toFixed(1)} 16V${TOP + entry.stages.length * this.tall}`);
    if (!whole && (x < view.scrollLeft || x > view.scrollLeft + view.clientWidth)) view.scrollLeft = x - view.clientWidth / 4;
    const highest = Math.max(...entry.peak) || 1;
    this.memory.dataset.head = whole ? this.memory.dataset.peak : "in flight now";
    [...this.memory.children].forEach((item, rank) => {
      item.querySelector("b").style.width = 100 * held[rank] / highest + "%";
      item.querySelector("span").textContent = whole ? this.peakWords(rank) : number(held[rank]);
    });
    for (const item of this.facts.children) if (item.firstChild.textContent === "bubble")
      item.lastChild.textContent = percent(whole ? entry.bubble : bubbleAt(this.items, entry.p, now));
  }

  // Where an item's row begins, and how high it is.
  top(item) {
    return TOP + item.rank * this.tall + (item.copy ? CELL + 4 + item.lane * LANE : 0);
  }

  height(item) {
    return item.copy ? LANE - 2 : CELL;
  }

  stays(rank, slot, place, svg, scale) {
    const y = TOP + rank * this.tall + CELL + 4 + lanesOf(this.entry).length * LANE + 3 + place * SLOT;
    for (const stay of slot.stays) {
      const x = stay.start * scale, width = Math.max((stay.end - stay.start) * scale - 1.5, .8);
      const rect = el("rect", {class: "stay", x: (x + .5).toFixed(2), y, width: width.toFixed(2), height: SLOT - 2, rx: 2}, svg);
      rect.words = `${slot.name[0].toUpperCase() + slot.name.slice(1)} of rank ${rank} holds the ${MOVED[slot.what][1]} of stage ${stay.stage}: `
        + `${time(this.entry, stay.start)} to ${time(this.entry, stay.end)} (${time(this.entry, stay.end - stay.start)}).`;
      if (width > 22) el("text", {class: "in", x: (x + 5).toFixed(2), y: y + (SLOT - 2) / 2}, svg, `stage ${stay.stage}`.slice(width > 44 ? 0 : 6));
    }
  }

  // Micro-batches in flight over time, as high as the most of any rank.
  held(rank, svg, scale) {
    const highest = Math.max(...this.entry.peak) || 1, base = TOP + rank * this.tall + this.heldTop + HELD - 4;
    const high = count => (base - count / highest * (HELD - 5)).toFixed(1);
    let d = `M0 ${base}`;
    for (const [time, count] of heldOver(this.entry, rank)) d += `H${(time * scale).toFixed(1)}V${high(Math.max(count, 0))}`;
    const path = el("path", {class: "held", d: `${d}V${base}Z`}, svg);
    path.words = `Micro-batches in flight on rank ${rank} over time; at most ${this.peakWords(rank)}.`;
  }

  bar(copy, svg, scale) {
    const x = copy.start * scale, width = (copy.end - copy.start) * scale, y = this.top(copy), words = label(copy);
    const rect = el("rect", {class: "cell " + copy.copy, x: (x + .4).toFixed(2), y, width: Math.max(width - .8, .8).toFixed(2), height: LANE - 2, rx: 2}, svg);
    rect.own = copy.own;
    const size = Math.min((width - 2) / (.6 * words.length), 8.5);
    if (size < 6.5) return [rect];
    return [rect, el("text", {class: "n paper", x: (x + width / 2).toFixed(2), y: y + (LANE - 2) / 2, "font-size": size.toFixed(1)}, svg, words)];
  }

  cell(box, svg, scale) {
    const x = box.start * scale, width = (box.end - box.start) * scale, y = this.top(box);
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
    if (this.kept) return;
    if (event.target.own !== undefined) this.select(event.target.own);
    else if (event.target.words) this.select(-1, event.target.words);
  }

  click(event) {
    const own = event.target.own;
    this.kept = own !== undefined && !(this.kept && own === this.selected);
    this.select(own === undefined ? -1 : own);
  }

  select(own, words) {
    this.selected = own;
    this.mark();
    this.describe(words);
  }

  mark() {
    const at = this.selected >= 0 ? this.selected : state.critical ? lastOf(this.items) : -1;
    const chain = at >= 0 ? chainOf(this.items, at) : [], on = new Set(chain);
    this.svg.classList.toggle("dimmed", at >= 0);
    this.cells.forEach((parts, own) => parts.forEach((part, place) => {
      part.classList.toggle("on", on.has(own));
      if (!place) part.classList.toggle("at", own === this.selected);
    }));
    let d = "";
    for (const own of chain) {
      const item = this.items[own], by = this.items[item.by];
      if (by && by.line !== item.line) {
        const from = by.end * this.scale, to = item.start * this.scale, down = item.line > by.line;
        d += `M${from.toFixed(1)} ${this.top(by) + (down ? this.height(by) : 0)}`
          + `L${to.toFixed(1)} ${this.top(item) + (down ? 0 : this.height(item))}`;
      }
    }
    this.chain.setAttribute("d", d);
  }

  describe(words) {
    const item = this.items[this.selected], entry = this.entry;
    if (!item) {
      this.detail.textContent = words || (state.critical ? this.path()
        : `Rest on an instruction${entry.s ? ", a copy or a slot" : entry.copies ? " or a copy" : ""}, or step through them with the arrow keys.`);
      return;
    }
    const what = tag("b", "", short(item)), batch = item.mb >= 0 ? `, micro-batch ${item.mb}` : "";
    const moved = item.copy && `the ${MOVED[item.what][1]} of stage ${item.stage}${batch}`;
    const where = item.copy === "host" ? ` takes ${moved}, where the states stay: `
      : item.copy === "evict" ? ` takes ${moved} from rank ${item.rank} to the ${entry.tier}: `
      : item.copy === "gather" ? ` joins ${moved} from the parts of its copies, on rank ${item.rank}: `
      : item.copy === "sum" ? ` sums ${moved} over its copies, for the part of rank ${item.rank}: `
      : item.copy ? ` brings ${moved} from the ${entry.tier} to rank ${item.rank}: `
      : ` ${families[item.letter]} of stage ${item.stage}${batch}, with weights ${item.version}, on rank ${item.rank}: `;
    const when = `${time(entry, item.start)} to ${time(entry, item.end)} (${time(entry, item.end - item.start)}). `;
    this.detail.replaceChildren(what, where + when, tag("span", "why", item.copy ? this.whyCopy(item) : this.why(item)));
  }

  path() {
    const path = chainOf(this.items, lastOf(this.items)).map(own => this.items[own]);
    const copies = path.filter(item => item.copy).length, crossings = path.filter(item => item.why === 2).length;
    const found = [`${count(path.length - copies, "instruction")}`];
    if (copies) found.push(count(copies, "copy").replace("copys", "copies"));
    if (crossings || !this.entry.copies) found.push(count(crossings, "message"));
    return `Critical path: ${found.join(", ").replace(/, ([^,]*)$/, " and $1")} decide the makespan.`;
  }

  why(box) {
    const by = this.items[box.by], idle = box.wait > 1e-9 * this.entry.makespan;
    const waited = idle ? `The rank stood idle for ${time(this.entry, box.wait)}` : "It started at once";
    if (!by) return waited + ": nothing came before it.";
    const sender = `${short(by)} on rank ${by.rank}`, kind = WHY[box.why];
    if (kind === "message") return `${waited}: it waited for the message of ${sender}.`;
    if (kind === "reduction" && by.copy !== "sum") return `${waited}: it waited for the reduction after ${sender}.`;
    if (kind === "copy" || kind === "reduction") return `${waited}: it waited for ${this.copyWords(by)}.`;
    return idle ? `${waited} after ${short(by)}.` : `It started as soon as the rank had finished ${short(by)}.`;
  }

  copyWords(by) {
    if (!by.copy) return `a copy after ${short(by)}`;
    return `the ${MOVED[by.what][1]} of stage ${by.stage}` + {fetch: " to arrive", evict: " to leave", host: " on the host", gather: " to be joined", sum: " to be summed"}[by.copy];
  }

  whyCopy(copy) {
    const by = this.items[copy.by], kind = WHY[copy.why], long = copy.wait > 1e-9 * this.entry.makespan;
    const waited = long ? `It waited for ${time(this.entry, copy.wait)}` : "It began as soon as it was asked for";
    if (!by) return "It began at once: nothing came before it.";
    if (kind === "lane") return `${waited}: its lane was busy with ${short(by)}.`;
    if (kind === "copy") {
      const room = copy.copy === "fetch" && by.copy === "evict" && by.stage !== copy.stage;
      return `${waited}: ${room ? "its slot was free only after" : "it needed"} ${short(by)}.`;
    }
    if (kind === "message" || kind === "reduction") return `${waited}: it needed the ${kind} after ${short(by)}.`;
    return `${waited}: ${by.rank === copy.rank ? "the rank" : `rank ${by.rank}`} came to it after ${short(by)}.`;
  }

  // -------------------------------------------------------------------------------------------------------- the keys
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const item = this.items[this.selected], row = item ? this.entry.rows[item.line] : this.entry.rows[0];
    let next;
    if (event.key === "ArrowRight") next = item ? row[Math.min(item.place + 1, row.length - 1)] : 0;
    else if (event.key === "ArrowLeft") next = item ? row[Math.max(item.place - 1, 0)] : 0;
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = item ? this.beside(item, event.key === "ArrowDown" ? 1 : -1) : 0;
    else if (event.key === "Enter") next = item && item.by >= 0 ? item.by : this.selected;
    else if (event.key === "Home") next = row[0];
    else if (event.key === "End") next = item ? row[row.length - 1] : lastOf(this.items);
    else if (event.key === "Escape") next = -1;
    else return;
    event.preventDefault();
    this.kept = next >= 0;
    this.select(next);
    if (next >= 0) this.reveal(this.items[next]);
  }

  // The item of the next row that is nearest in time.
  beside(item, step) {
    const rows = this.entry.rows;
    let line = item.line + step;
    while (rows[line] && !rows[line].length) line += step;
    if (!rows[line]) return item.own;
    const far = own => Math.abs(this.items[own].start + this.items[own].end - item.start - item.end);
    return rows[line].reduce((best, own) => far(own) < far(best) ? own : best);
  }

  reveal(box) {
    const left = box.start * this.scale, right = box.end * this.scale, view = this.scroll;
    if (left < view.scrollLeft) view.scrollLeft = left - 40;
    else if (right > view.scrollLeft + view.clientWidth) view.scrollLeft = right - view.clientWidth + 40;
  }
}
