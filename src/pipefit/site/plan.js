const $ = id => document.getElementById(id);
const pasted = {};  // the profile of a pasted configuration

function element(tag, text, parent, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  if (parent) parent.append(made);
  return made;
}

function fill(select, values) {
  const before = select.value;
  select.replaceChildren(...values.map(value => new Option(value, value)));
  if (values.map(String).includes(before)) select.value = before;
}

const unique = values => [...new Set(values)];
const kindOf = machine => machine.replace(/-\d+$/, "");
const GIB = 2 ** 30;
const MOST = 6;  // plans that are shown at once

function short(number) {
  for (const [scale, letter] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]])
    if (number >= scale) return Number((number / scale).toPrecision(4)) + letter;
  return String(Number(number.toPrecision(3)));
}

// The sizes that a transformer's configuration names, as `pipefit plan --profile` takes them; an Error says what is missing.
function profileOf(text) {
  let config = JSON.parse(text);
  config = config.text_config ?? config;
  const first = (...names) => names.map(name => config[name]).find(value => value !== undefined && value !== null);
  const layers = first("num_hidden_layers", "n_layer"), hidden = first("hidden_size", "n_embd");
  const heads = first("num_attention_heads", "n_head"), vocab = first("vocab_size");
  const sizes = { num_hidden_layers: layers, hidden_size: hidden, num_attention_heads: heads, vocab_size: vocab };
  const missing = Object.keys(sizes).filter(name => !Number.isInteger(sizes[name]));
  if (missing.length) throw Error(`expected ${missing.join(", ")} in the configuration`);
  if (first("num_local_experts", "num_experts", "n_routed_experts")) throw Error("a mixture of experts cannot be planned by its sizes");
  if (config.head_dim && config.head_dim * heads !== hidden) throw Error("heads whose width is not hidden_size / num_attention_heads cannot be planned by sizes");
  const sequence = first("max_position_embeddings", "n_positions", "n_ctx");
  const common = `layers=${layers},hidden=${hidden},heads=${heads}`;
  const end = `,vocab=${vocab}` + (sequence ? `,sequence=${Math.min(sequence, 8192)}` : "");
  if (["llama", "mistral", "qwen2"].includes(config.model_type)) {
    const keys = config.num_key_value_heads ?? heads;
    return `llama:${common}` + (keys === heads ? "" : `,kv_heads=${keys}`) + `,ffn=${config.intermediate_size}${end}`
      + (config.tie_word_embeddings ? ",tied=1" : "");
  }
  if (config.model_type === "gpt2") return `gpt:${common}${end}`;
  throw Error(`model_type ${config.model_type ?? "(none)"}: expected llama, mistral, qwen2 or gpt2; measure others with pipefit profile`);
}

// Sizes that decide a plan, in one order: two texts of the same model are alike.
const usualVocab = { gpt: 51200, llama: 32000 };
const alike = text => (text + (/vocab=/.test(text) ? "" : `,vocab=${usualVocab[text.split(":")[0]]}`))
  .replace(/,sequence=\d+/, "").split(/[:,]/).sort().join(",");

function readConfig() {
  const text = $("config").value.trim();
  const read = $("read");
  delete pasted.profile;
  read.className = "soft";
  read.textContent = "";
  if (text) {
    try {
      pasted.profile = profileOf(text);
      const known = Object.keys(grid.models).find(name => alike(grid.models[name].profile) === alike(pasted.profile));
      if (known) {
        delete pasted.profile;
        $("model").value = known;
        read.textContent = `These are the sizes of ${known}, here with ${grid.models[known].sequence} tokens a sample.`;
      } else read.textContent = `${pasted.profile}: no plan was computed ahead. The command below plans it.`;
    } catch (problem) {
      read.className = "bad";
      read.textContent = problem instanceof SyntaxError ? `not JSON: ${problem.message}` : problem.message;
    }
  }
  show();
}

function show() {
  const kind = $("kind").value;
  fill($("devices"), unique(grid.cells.filter(cell => kindOf(cell.machine) === kind).map(cell => cell.devices)));
  const name = $("model").value, devices = Number($("devices").value), batch = Number($("batch").value);
  const cell = grid.cells.find(each => each.model === name && kindOf(each.machine) === kind && each.devices === devices && each.batch === batch);
  const model = grid.models[name], tokens = 1e9 * Number($("tokens").value);
  const profile = pasted.profile ?? model.profile;
  const words = ["pipefit plan --profile", profile, "--topology", cell.machine, "--global-batch", batch];
  if (tokens > 0) words.push("--tokens", tokens.toExponential().replace("+", ""));
  $("command").textContent = words.join(" ");
  const answer = $("answer");
  answer.replaceChildren();
  $("figures").replaceChildren();
  if (pasted.profile) return;
  if (cell.why) {
    element("h2", "Nothing fits", answer);
    element("pre", cell.why, answer);
    return;
  }
  figures($("figures"), cell, model, tokens);
  plans(answer, cell, model, tokens);
  memory(answer, cell);
}

function figures(parent, cell, model, tokens) {
  const add = (value, words) => {
    const made = element("div", undefined, parent);
    element("b", value, made);
    made.append(words);
  };
  const rate = cell.plans[0].throughput;
  add(short(model.parameters), "parameters");
  add(short(rate * model.sequence), "tokens/s");
  if (!(tokens > 0)) return;
  const days = tokens / (rate * model.sequence) / 86400, hours = days * 24 * cell.devices;
  add(short(days), "days");
  add(short(hours), "GPU hours");
  add(short(hours * Number($("price").value)), "at your price");
}

function plans(parent, cell, model, tokens) {
  element("h2", `Plans that fit ${cell.devices} GPUs`, parent);
  const table = element("table", undefined, parent, "plans");
  const head = element("tr", undefined, table);
  for (const name of ["plan", "samples/s", "days", "slower", "fullest GPU"]) element("th", name, head);
  const more = element("details", undefined, parent);
  element("summary", `${cell.plans.length - MOST} more`, more);
  const rest = element("table", undefined, more, "plans");
  more.hidden = cell.plans.length <= MOST;
  for (const [number, plan] of cell.plans.entries()) {
    const row = element("tr", undefined, number < MOST ? table : rest);
    const sign = { simulated: "", estimated: "~", "at best": "≤ " }[plan.basis] ?? "";
    element("td", plan.summary, row);
    const days = sign.replace("≤", "≥") + short(tokens / (plan.throughput * model.sequence) / 86400);
    element("td", sign + short(plan.throughput), row, "number");
    element("td", tokens > 0 ? days : "", row, "number");
    element("td", plan.slower ? (100 * plan.slower).toFixed(1) + " %" : "", row, "number");
    element("td", plan.peak_bytes ? short(plan.peak_bytes / GIB) + " GiB" : "", row, "number");
  }
  element("p", "≤ and ≥: bounds that the plan cannot beat; ~: estimated; all others are simulated.", parent, "soft");
}

function memory(parent, cell) {
  element("h2", "Memory of each rank, first plan", parent);
  const bars = element("div", undefined, parent, "bars");
  const ranks = new Map();  // by what they hold
  for (const [rank, bytes] of cell.memory.entries()) {
    const gib = short(bytes / GIB);
    ranks.set(gib, [...(ranks.get(gib) ?? []), rank]);
  }
  for (const [gib, own] of ranks) {
    const words = own.length > 3 ? `ranks ${own.slice(0, 3).join(", ")} … (${own.length})` : `rank ${own.join(", ")}`;
    element("div", words, bars);
    const bar = element("i", undefined, element("span", undefined, bars));
    bar.style.width = Math.min(100, 100 * cell.memory[own[0]] / cell.capacity) + "%";
    element("div", `${gib} GiB`, bars);
  }
  element("p", `The whole width is a GPU's ${short(cell.capacity / GIB)} GiB.`, parent, "soft");
}

fill($("model"), Object.keys(grid.models));
fill($("kind"), unique(grid.cells.map(cell => kindOf(cell.machine))));
fill($("batch"), unique(grid.cells.map(cell => cell.batch)));
for (const id of ["kind", "devices", "batch", "tokens", "price"]) $(id).addEventListener("input", show);
$("model").addEventListener("input", () => { $("config").value = ""; readConfig(); });
$("config").addEventListener("input", readConfig);
$("form").addEventListener("submit", event => event.preventDefault());
$("copy").addEventListener("click", () => {
  getSelection().selectAllChildren($("command"));
  document.execCommand("copy");
});
show();
