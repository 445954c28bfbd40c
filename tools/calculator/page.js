const CHINESE = 1;
const SAID = {
  title: ["How much GPU memory does a training take?", "训练要占多少显存？"],
  intro: ["Published architectures, replayed through PyTorch's caching allocator in this page: the same answer as the command's, to the byte. Nothing is sent anywhere.", "在本页里用 PyTorch 的缓存分配器重放已发布架构的训练：答案与命令行一致，精确到字节。不向任何地方发送数据。"],
  model: ["Architecture", "架构"], adapters: ["Trained", "训练什么"], numbers: ["Weights and precision", "权重与精度"],
  optimizer: ["Optimizer", "优化器"], checkpointing: ["Activation checkpointing", "激活检查点"],
  length: ["Tokens of a text", "文本的 token 数"], batch: ["Batch size", "批大小"], gpu: ["GPU", "GPU"],
  full: ["all weights", "全部权重"], lora: ["LoRA adapters", "LoRA 适配器"],
  qlora: ["QLoRA adapters, 4-bit weights", "QLoRA 适配器，权重为 4 位"],
  off: ["off", "关"], on: ["on", "开"],
  true: ["{0} throughout", "全部用 {0}"], mixed: ["{0}, autocast to {1}", "权重 {0}，混合精度 {1}"],
  fits: ["Fits: {0} of {1} usable, {2} to spare", "放得下：可用 {1}，占 {0}，还剩 {2}"],
  over: ["Does not fit: {0} of {1} usable, {2} too much", "放不下：可用 {1}，要占 {0}，多出 {2}"],
  reserved: ["Peak reserved", "预留峰值"], usable: ["Usable", "可用"], spare: ["To spare", "剩余"], missing: ["Too much", "多出"],
  largest: ["Largest batch size", "最大批大小"], none: ["not even 1", "1 也放不下"], seeking: ["…", "…"],
  place: ["Peak allocated", "已分配峰值"], placed: ["in {0}, step {1}", "第 {1} 步，{0}"],
  bytes: ["{0} bytes", "{0} 字节"], free: ["reserved, not in use", "已预留、未使用"],
  placement: ["Placement", "段的位置"],
  placements: ["{0} or {1}: how CUDA places memory on this card is not known, and the larger amount counts", "{0} 或 {1}：尚不知道 CUDA 在这块卡上怎样放置显存，以较大者为准"],
  range: ["Range", "范围"],
  ranges: ["{0} to {1}: how much cuDNN's workspaces take in float32 is not known", "{0} 到 {1}：尚不知道 cuDNN 在 float32 下的工作区占多少"],
  command: ["The same answer from the command line", "用命令行得到同样的答案"], copy: ["Copy", "复制"], copied: ["Copied", "已复制"],
  others: ["The same training on every card", "同样的训练在每块卡上"], result: ["Result", "结果"],
  fitting: ["fits", "放得下"], failing: ["does not fit", "放不下"], untold: ["not in the tables", "表中没有"],
  assumed: ["Assumed", "所作的假设"],
  loss: ["The loss is the model's own; {0}; gradients are set to None after each step.", "损失用模型自带的；{0}；每步之后把梯度设为 None。"],
  mean: ["The loss is the mean square of the first output; {0}; gradients are set to None after each step.", "损失是第一个输出的均方；{0}；每步之后把梯度设为 None。"],
  sample: ["One sample is {0}.", "一个样本是{0}。"], parameters: ["{0} has {1} parameters.", "{0} 有 {1} 个参数。"], tokens: ["a text of {0} tokens", "一条 {0} 个 token 的文本"], picture: ["a picture of {0}", "一张 {0} 的图"],
  peft: ["Rank and target modules are those that peft chooses for the architecture.", "秩和目标模块是 peft 为该架构选的默认值。"],
  releases: ["Releases: {0}.", "版本：{0}。"],
  wrong: ["Give a whole batch size from 1 to 65,536, and texts of {0} to {1} tokens in steps of {2}.", "批大小请填 1 到 65536 的整数；文本请填 {0} 到 {1} 个 token，且为 {2} 的倍数。"],
  pictures: ["Give a whole batch size from 1 to 65,536.", "批大小请填 1 到 65536 的整数。"],
  absent: ["The tables do not have this training on {0}. The command traces it, where its libraries are installed.", "表中没有这个训练在 {0} 上的数据。装有所需的库时，命令行会跟踪它。"],
  beyond: ["This page cannot replay this training ({0}), and does not guess. The command can.", "本页无法重放这个训练（{0}），也不猜测。请用命令行。"],
  old: ["This browser is too old for this page.", "浏览器版本过旧，无法显示本页。"],
};

const at = (id) => document.getElementById(id);
const tables = new Map();
let facts, state, shown, round = 0;

const language = () => (state.lang === "zh" ? CHINESE : 0);
const say = (key, ...values) => SAID[key][language()].replace(/\{(\d)\}/g, (_, index) => values[index]);
const count = (number) => number.toLocaleString("en-US");

/** As vram_guard.units.format_bytes; halves go to the even digit. */
function amount(bytes) {
  const unit = ["TiB", "GiB", "MiB", "KiB"].findIndex((_, index) => bytes >= 1024 ** (4 - index));
  const size = bytes / 1024 ** (4 - unit);
  return unit < 0 ? `${bytes} B` : `${(size % 0.5 === 0.125 ? size - 0.001 : size).toFixed(2)} ${["TiB", "GiB", "MiB", "KiB"][unit]}`;
}

function node(tag, text = "", attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.textContent = text;
  return made;
}

const table = (name) => {
  if (!tables.has(name)) tables.set(name, unpacked(document.querySelector(`[data-table="${name}"]`).textContent));
  return tables.get(name);
};

function choices(id, values, label, group) {
  const select = at(id), all = [...new Set(values.map(String))];
  if (!all.includes(state[id])) state[id] = all[0];
  const options = all.map((value) => ({ value, made: node("option", label(value), { value }) }));
  const groups = group ? [...new Set(all.map(group))].map((name) => node("optgroup", "", { label: name })) : [];
  for (const made of groups) made.append(...options.filter(({ value }) => group(value) === made.label).map((one) => one.made));
  select.replaceChildren(...(group ? groups : options.map((one) => one.made)));
  select.value = state[id];
}

const kinds = {
  adapters: [(one) => one.adapters || "full", (value) => say(value)],
  numbers: [(one) => `${one.dtype},${one.precision}`, (value) => {
    const [weights, precision] = value.split(","), word = { 32: "float32", bf16: "bfloat16", 16: "float16" };
    return say(precision.endsWith("true") ? "true" : "mixed", weights, word[precision.split("-")[0]]);
  }],
  optimizer: [(one) => one.optimizer, (value) => facts.optimizers[value][language()]],
  checkpointing: [(one) => (one.checkpointing ? "on" : "off"), (value) => say(value)],
};

/** The form for the state, which becomes one that the tables have; the training that it names. */
function form(model) {
  let left = model.trainings;
  for (const [id, [of, label]] of Object.entries(kinds)) {
    choices(id, left.map(of), label);
    left = left.filter((one) => of(one) === state[id]);
  }
  choices("gpu", facts.cards.map((card) => card.name), String, (name) => facts.cards.find((card) => card.name === name).group);
  const [low, high] = left[0].timelines[0].lengths;
  const changed = shown && shown !== state.model;
  if (!state.length || (changed && +state.length > high)) state.length = String(model.length ?? "");
  shown = state.model;
  Object.assign(at("length"), { min: low, max: high, step: facts.step, disabled: !model.length });
  at("length").parentNode.hidden = !model.length;
  for (const id of ["length", "batch"]) if (document.activeElement !== at(id)) at(id).value = state[id];
  return left[0];
}

function verdict(kind, text) {
  Object.assign(at("verdict"), { textContent: text, className: `verdict ${kind}` });
  at("result").hidden = !["fits", "over"].includes(kind);
  document.documentElement.dataset.verdict = kind;
}

function show(found, usable, explained) {
  const spare = usable - found.reserved, kind = spare >= 0 ? "fits" : "over";
  verdict(kind, say(kind, amount(found.reserved), amount(usable), amount(Math.abs(spare))));
  const scale = 100 / Math.max(found.reserved, usable), unused = found.reserved - found.allocated;
  const parts = Object.entries(found.breakdown).filter(([, size]) => size).sort((one, other) => other[1] - one[1])
    .map(([name, size]) => [facts.categories[name][language()], size, `var(--${name})`]);
  if (unused) parts.push([say("free"), unused, "var(--free)"]);
  const limit = node("i");
  limit.style.left = `min(${usable * scale}%, 100% - 2px)`;
  at("bar").replaceChildren(...parts.map(([, size, color]) => {
    const part = node("span");
    [part.style.width, part.style.background] = [`${size * scale}%`, color];
    return part;
  }), limit);
  const lines = [...parts, [say("usable"), usable, "none"]].map(([name, size, color]) => {
    const line = node("li", name, { className: color === "none" ? "limit" : "" });
    line.style.setProperty("--c", color);
    line.append(node("b", amount(size)));
    return line;
  });
  at("legend").replaceChildren(...lines);
  at("bar").ariaLabel = parts.map(([name, size]) => `${name} ${amount(size)}`).join(", ");
  const phase = facts.phases[found.phase][language()];
  const rows = [
    ["reserved", amount(found.reserved), say("bytes", count(found.reserved))],
    [spare >= 0 ? "spare" : "missing", amount(Math.abs(spare)), say("bytes", count(Math.abs(spare)))],
    ["largest", say("seeking"), ""],
    ["place", amount(found.allocated), say("placed", phase, found.step)],
    found.lower && ["placement", "", say("placements", amount(found.lower), amount(found.reserved))],
    found.upper && ["range", "", say("ranges", amount(found.reserved), amount(found.upper))],
    ["usable", "", explained[language()]],
  ].filter(Boolean);
  at("figures").replaceChildren(...rows.flatMap(([key, value, small]) => {
    const said = node("dd", value && `${value} `, { id: `is-${key}` });
    said.append(node("small", small));
    return [node("dt", say(key)), said];
  }));
  Object.assign(document.documentElement.dataset, { ...found, breakdown: JSON.stringify(found.breakdown), usable });
}

function otherCards(training, length, mine) {
  at("cards").replaceChildren();
  const left = [...facts.cards];
  (function some() {
    if (mine !== round || !at("others").open) return;
    for (const card of left.splice(0, 6)) {
      const timeline = timelineOn(training.timelines, card), row = node("tr");
      let cells = ["", "", say("untold")];
      if (timeline) {
        const { reserved } = answer(timeline, length, +state.batch, card), usable = card.usable[timeline.network];
        cells = [amount(usable), amount(reserved), say(reserved <= usable ? "fitting" : "failing")];
        row.className = reserved <= usable ? "fits" : "";
      }
      row.append(node("td", card.name), ...cells.map((cell, index) => node("td", cell, { className: index < 2 ? "n" : "" })));
      at("cards").append(row);
    }
    if (left.length) setTimeout(some);
  })();
}

async function render() {
  const mine = ++round, dataset = document.documentElement.dataset;
  for (const name of Object.keys(dataset)) delete dataset[name];
  choices("model", Object.keys(facts.architectures), String);
  const model = await table(state.model);
  if (mine !== round) return;
  document.documentElement.lang = ["en", "zh-CN"][language()];
  document.title = say("title");
  for (const one of document.querySelectorAll("[data-say]")) one.textContent = say(one.dataset.say);
  at("intro").textContent = say("intro");
  at("lang").textContent = ["中文", "English"][language()];
  at("lang").lang = ["zh", "en"][language()];
  const training = form(model), [low, high] = training.timelines[0].lengths, length = model.length ? +state.length : 0;
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  const card = facts.cards.find((one) => one.name === state.gpu), timeline = timelineOn(training.timelines, card);
  const isCount = Number.isInteger(+state.batch) && +state.batch >= 1 && +state.batch <= 65536;
  const isLength = length >= low && length <= high && (!model.length || length % facts.step === 0);
  at("same").hidden = at("others").hidden = !(isCount && isLength);
  at("command").textContent = command(state.model, training, length, state.batch, state.gpu);
  const one = model.length ? say("tokens", length) : say("picture", model.sample);
  at("assumed").replaceChildren(...[
    facts.architectures[state.model] && say("parameters", state.model, count(facts.architectures[state.model])),
    say("sample", one), say(model.own_loss ? "loss" : "mean", facts.optimizers[training.optimizer][language()]),
    training.adapters && say("peft"),
    say("releases", Object.entries(training.timelines[0].releases).map((pair) => pair.join(" ")).join(", ")),
  ].filter(Boolean).map((line) => node("li", line)));
  if (!isCount || !isLength) return verdict("unknown", model.length ? say("wrong", low, high, facts.step) : say("pictures"));
  try {
    if (at("others").open) setTimeout(otherCards, 0, training, length, mine);
    if (!timeline) return verdict("unknown", say("absent", card.name));
    const usable = card.usable[timeline.network];
    show(answer(timeline, length, +state.batch, card), usable, card.explained[timeline.network]);
    setTimeout(() => {
      if (mine !== round) return;
      const most = largest(timeline, length, card, usable);
      at("is-largest").textContent = most ? count(most) : say("none");
      Object.assign(dataset, { largest: most, width: document.documentElement.scrollWidth });
    });
  } catch (error) {
    if (!(error instanceof Unknown)) throw error;
    verdict("unknown", say("beyond", error.message));
  }
}

function read() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const usual = {
    lang: navigator.language.startsWith("zh") ? "zh" : "en", model: "llama-3-8b", adapters: "lora", numbers: "",
    optimizer: "adamw", checkpointing: "on", length: given.model ? "" : "2048", batch: "1", gpu: "RTX 4090", ...given,
  };
  state = Object.fromEntries(Object.entries(usual).slice(0, 9));
}

async function start() {
  facts = await table("");
  read();
  for (const one of document.querySelectorAll("select, input")) {
    one.addEventListener("input", () => { state[one.id] = one.value; render(); });
  }
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  at("lang").addEventListener("click", () => { state.lang = language() ? "en" : "zh"; render(); });
  at("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(at("command").textContent);
    at("copy").textContent = say("copied");
  });
  at("others").addEventListener("toggle", render);
  addEventListener("hashchange", () => { read(); render(); });
  document.querySelector("main").hidden = false;
  await render();
}

start().catch((error) => { at("intro").textContent = `${SAID.old.join(" ")} ${error}`; });
