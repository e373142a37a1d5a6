// The cluster page: asks for a token, reads the lists that ctl reads, and shows them.
//
// Whatever comes from the API is text. Elements are made by el() from tags that are
// written here, and text reaches them as text nodes only; there is no markup in data.

const EVERY_MS = 2500;
const TIMEOUT_MS = 8000;
const LISTS = { models: "v1/models", nodes: "v1/nodes", replicas: "v1/replicas", engines: "v1/engines", events: "v1/events" };
const TOKEN = "llmgw-token";
const EVENTS_KEPT = 200;
const EVENTS_SHOWN = 40;
const SENTENCES_SHOWN = 6;
const LITTLE = 0.1;                // less than this share of memory or disk is free

const at = (id) => document.getElementById(id);


// ---- text -------------------------------------------------------------------------------------

const MOVES_THE_READER = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;   // controls, bidi, unassigned
const TERMINAL_COLOUR = /\x1b\[[0-9;?]*[ -/]*[@-~]/g;
const PILE_OF_MARKS = /(\p{M}{4})\p{M}+/gu;

/** Return any value as one line of text that cannot reorder or cover what stands around it. */
function line(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return text.slice(0, 8000).replace(TERMINAL_COLOUR, "").replace(MOVES_THE_READER, " ")
    .replace(PILE_OF_MARKS, "$1").trim();
}

/** Return an engine's output line by line, indents kept. */
function lines(value) {
  return String(value ?? "").slice(-65536).split("\n").map((text) => {
    const opened = text.replace(/\r$/, "").split("\r").pop().replaceAll("\t", "    ");
    return opened.match(/^ {0,40}/)[0] + line(opened);
  }).join("\n");
}

/** Return bytes as people read them, powers of 1000. */
function size(count) {
  if (typeof count !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = count;
  while (value >= 999.5 && units.length > 1) { value /= 1000; units.shift(); }
  return `${value < 9.95 && units[0] !== "B" ? value.toFixed(1) : value.toFixed(0)} ${units[0]}`;
}

function age(seconds) {
  if (typeof seconds !== "number") return "–";
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h`;
  return `${Math.floor(whole / 86400)} d`;
}

function clock(date) {
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (date.toDateString() === new Date().toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time.slice(0, 5)}`;
}

const moment = (seconds) => (seconds > 0 ? clock(new Date(seconds * 1000)) : "–");
const number = (value) => (typeof value === "number" ? String(Math.round(value * 10) / 10) : "–");
const list = (value) => (Array.isArray(value) ? value : []);
const percent = (done, total) => Math.min(100, Math.floor((done * 100) / total));
const unique = (values) => [...new Set(values)];
const join = (...words) => words.filter(Boolean).join(" ");
const sum = (values) => values.reduce((total, value) => total + value, 0);

function several(count, one, more) {
  return `${count} ${count === 1 ? one : more}`;
}


// ---- what is wanted on the screen, and how it gets there with no more changes than needed ---------

const keys = new WeakMap();       // element -> its key among its siblings
const dresses = new WeakMap();    // element -> the attributes that we gave it

/** Describe an element. Attributes that are null or false are absent; ``key`` tells siblings apart. */
function el(tag, attributes, ...children) {
  const { key, ...rest } = attributes ?? {};
  return { tag, key, attributes: rest, children };
}

/** Make ``parent`` hold exactly ``wanted``; what is there already stays, so focus and selection do too. */
function fill(parent, ...wanted) {
  const items = wanted.flat(Infinity).filter((item) => item !== null && item !== undefined && item !== false && item !== "");
  const counts = new Map();
  const named = items.map((item) => {
    const kind = typeof item === "object" ? item.tag : "#text";
    let key = `${kind} ${typeof item === "object" && item.key !== undefined ? `=${item.key}` : ""}`;
    const seen = counts.get(key) ?? 0;
    counts.set(key, seen + 1);
    return [`${key} ${seen}`, item];
  });
  const there = new Map();
  const needed = new Set(named.map(([key]) => key));
  for (const node of [...parent.childNodes]) {
    const key = keys.get(node);
    if (needed.has(key)) there.set(key, node);
    else if (key !== undefined || parent.nodeName !== "TABLE") node.remove();
  }
  let place = [...parent.childNodes].find((node) => keys.has(node)) ?? null;
  for (const [key, item] of named) {
    let node = there.get(key);
    if (!node) {
      node = typeof item === "object" ? document.createElement(item.tag) : document.createTextNode("");
      keys.set(node, key);
    }
    if (typeof item === "object") { dress(node, item.attributes); fill(node, item.children); }
    else if (node.data !== String(item)) node.data = String(item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
}

function dress(node, attributes) {
  const before = dresses.get(node) ?? {};
  for (const name of Object.keys(before)) {
    if (!isSet(attributes[name])) node.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(attributes)) {
    if (isSet(value) && before[name] !== value) node.setAttribute(name, value === true ? "" : String(value));
  }
  dresses.set(node, attributes);
}

const isSet = (value) => value !== null && value !== undefined && value !== false;


// ---- words of state -----------------------------------------------------------------------------

const KINDS = {
  good: ["ready", "installed", "whole", "run"],
  busy: ["wanted", "resolving", "downloading", "verifying", "unpacking", "installing packages", "checking", "waiting",
    "fetching", "starting", "stopping", "drain", "draining", "placed", "pending"],
  warn: ["suspect", "unready", "backoff", "unknown"],
  bad: ["unreachable", "lost", "failed", "missing", "crashloop", "damaged"],
};
const KIND = new Map(Object.entries(KINDS).flatMap(([kind, words]) => words.map((word) => [word, kind])));
const kindOf = (word) => KIND.get(word) ?? "idle";
const worst = (kinds) => ["bad", "warn"].find((kind) => kinds.includes(kind)) ?? "";

const badge = (word, kind = kindOf(word)) => el("span", { class: `badge ${kind}` }, line(word) || "unknown");
const small = (...children) => el("small", {}, ...children);
const name = (value) => el("bdi", {}, line(value) || "–");
const note = (kind, text) => el("li", { class: `note ${kind}` }, line(text));
const cell = (className, ...children) => el("td", { role: "cell", class: className }, ...children);
const labelled = (label, className, ...children) =>
  el("td", { role: "cell", class: className, "data-label": label }, ...children);
const first = (spans, ...children) => el("td", { role: "cell", class: "name", rowspan: spans ? 2 : null }, ...children);
const below = (columns, ...children) => el("td", { role: "cell", class: "wide", colspan: columns }, ...children);
const row = (...cells) => el("tr", { role: "row" }, ...cells);
const idOf = (kind, value) => `${kind}-${encodeURIComponent(line(value))}`;
const link = (kind, value) => el("a", { href: `#${idOf(kind, value)}` }, name(value));

function rows(kind, key, troubles, ...children) {
  return el("tbody", { role: "rowgroup", key, id: idOf(kind, key), class: worst(troubles) || null }, ...children);
}

function bar(what, done, total) {
  if (typeof done !== "number" || typeof total !== "number" || total <= 0) return null;
  const share = percent(done, total);
  return el("progress", { max: 100, value: share, "aria-label": `${line(what)}: ${share} %` });
}

/** Show every sentence; a long row of them folds after the first few. */
function sentences(all) {
  const items = all.map((text) => el("li", {}, line(text)));
  if (items.length <= SENTENCES_SHOWN + 1) return el("ul", { class: "why" }, items);
  return [
    el("ul", { class: "why" }, items.slice(0, SENTENCES_SHOWN)),
    el("details", {}, el("summary", {}, `${items.length - SENTENCES_SHOWN} more reasons`),
      el("ul", { class: "why" }, items.slice(SENTENCES_SHOWN))),
  ];
}


// ---- models ---------------------------------------------------------------------------------------

function modelState(model, replicas) {
  const { ready = 0, wanted = 0 } = model;
  if (wanted === 0 && ready === 0) return ["stopped", "idle"];
  const words = `${ready} of ${wanted} ready`;
  if (ready >= wanted) return [words, "good"];
  if (ready > 0) return [words, "warn"];
  return [words, replicas.some((replica) => kindOf(replica.state) === "busy") ? "busy" : "bad"];
}

function modelRows(model, data) {
  const replicas = data.replicas.filter((replica) => replica.model === model.name);
  const nodes = unique(replicas.flatMap((replica) => list(replica.shards).map((shard) => shard.node)));
  const [words, kind] = modelState(model, replicas);
  const aliases = list(model.aliases);
  const reasons = (model.ready ?? 0) < (model.wanted ?? 0) ? list(model.why_not) : [];
  return rows("model", model.name, [kind],
    row(
      first(reasons.length > 0, name(model.name),
        aliases.length > 0 && small("also called ", aliases.map((alias, index) => [index > 0 && ", ", name(alias)])),
        model.task && model.task !== "chat" && small(line(model.task))),
      cell("state", badge(words, kind)),
      labelled("where", nodes.length > 2 ? "wide" : "", nodes.length === 0 ? "–"
        : nodes.map((node, index) => [index > 0 && ", ", link("node", node)])),
      labelled("engine", "", join(line(model.engine), line(model.engine_version))),
      labelled("context", "number", number(model.context_length)),
      labelled("size", "number", size(model.size_bytes)),
      labelled("weights", "wide mono", line(model.weights))),
    reasons.length > 0 && row(below(6, sentences(reasons))));
}


// ---- nodes ----------------------------------------------------------------------------------------

const VECTORS = [["avx2", "AVX2"], ["avx512f", "AVX-512"], ["amx_int8", "AMX"], ["neon", "NEON"], ["asimd", "NEON"], ["sve", "SVE"]];

function gpuFacts(facts) {
  const groups = new Map();
  for (const gpu of list(facts.gpus)) {
    const memory = typeof gpu.memory_total_bytes === "number" ? ` ${size(gpu.memory_total_bytes)}` : "";
    const word = `${line(gpu.name)}${memory}${gpu.mig ? " (MIG)" : ""}`;
    groups.set(word, (groups.get(word) ?? 0) + 1);
  }
  return [...groups].map(([word, count]) => `${count} × ${word}`);
}

/** Return a processor's name without what every such name has. */
const processor = (model) => line(line(model).replace(/\((R|TM)\)|( \d+-Core)? Processor\b/gi, ""));

function factLine(node) {
  const facts = node.facts ?? {};
  const os = facts.os ?? {};
  const has = new Set(list(facts.vector_extensions));
  const cores = facts.cpu_count ? `${facts.cpu_count} × ${processor(facts.cpu_model) || "processor"}` : processor(facts.cpu_model);
  return [
    line(os.pretty_name) || join(line(os.id), line(os.version_id)), line(facts.arch), cores,
    unique(VECTORS.filter(([word]) => has.has(word)).map(([, said]) => said)).join(", "),
    ...gpuFacts(facts), facts.nvidia_driver && `driver ${line(facts.nvidia_driver)}`,
    line(facts.libc), facts.kernel && `kernel ${line(facts.kernel)}`, facts.python && `Python ${line(facts.python)}`,
  ].filter(Boolean);
}

function engineKind(engine) {
  if (engine.phase === "installed" && !engine.usable) return "warn";
  return kindOf(engine.phase);
}

function engineSaid(engine) {
  const devices = list(engine.devices).map(line).filter(Boolean).join(", ");
  const head = `${engine.name} ${engine.version}: `;       // it stands before the sentence already
  const whole = line(engine.message);
  const said = (whole.startsWith(head) ? whole.slice(head.length) : whole) || (engine.phase === "installed" && !engine.usable ? "installed, but not seen to run" : "");
  const amount = said && !said.includes("%") && engine.total_bytes && typeof engine.done_bytes === "number" && engineKind(engine) === "busy"
    ? ` (${percent(engine.done_bytes, engine.total_bytes)} % of ${size(engine.total_bytes)})` : "";
  return [said + amount, devices && `${said ? " · " : ""}devices: ${devices}`].filter(Boolean);
}

function engineItem(engine) {
  const thing = join(line(engine.name), line(engine.version));
  const busy = engineKind(engine) === "busy";
  return el("li", { key: thing },
    badge(engine.phase, engineKind(engine)),
    el("div", {},
      el("span", { class: "thing" }, thing, engine.source === "operator" && " (brought by the operator)"),
      el("span", { class: "sentence" }, engineSaid(engine)),
      engine.hint && !engine.usable && el("span", { class: "hint" }, line(engine.hint)),
      busy && bar(thing, engine.done_bytes, engine.total_bytes)));
}

function weightsItem(weights) {
  const share = weights.total_bytes > 0 && weights.phase === "fetching"
    ? `${percent(weights.done_bytes, weights.total_bytes)} % of ${size(weights.total_bytes)}` : "";
  const said = line(weights.message);
  return el("li", { key: `weights ${weights.name} ${weights.fingerprint}` },
    badge(weights.phase),
    el("div", {},
      el("span", { class: "thing" }, "weights ", name(weights.name)),
      el("span", { class: "sentence" }, said, share && !said.includes("%") && (said ? ` (${share})` : share)),
      share && bar(`weights ${weights.name}`, weights.done_bytes, weights.total_bytes)));
}

function nodeNotes(node) {
  const notes = [];
  const said = line(node.message);
  if (node.state !== "ready") notes.push([worst([kindOf(node.state)]) || "idle", said || `it is ${line(node.state)}`]);
  else if (said && said !== "draining") notes.push([node.probed ? "idle" : "warn", said]);
  else if (!node.probed) notes.push(["warn", "has not finished looking at itself yet"]);
  if (node.draining) notes.push(["idle", "draining: takes no new replicas (llmgw.pyz ctl undrain ends it)"]);
  for (const warning of unique([...list(node.warnings), ...list(node.facts?.warnings)])) notes.push(["warn", warning]);
  return notes;
}

/** Return the kinds of everything that troubles a node. */
function troublesOf(node) {
  return [kindOf(node.state), ...nodeNotes(node).map(([kind]) => kind), ...list(node.engines).map(engineKind),
    ...list(node.weights).map((weights) => kindOf(weights.phase))];
}

const needsAttention = (node) => worst(troublesOf(node)) !== "";

/** Show what is free of how much; little is said with a sign and a colour. */
function free(label, left, total) {
  if (!total) return labelled(label, "free", "–");
  const words = size(total);
  const [value, unit] = size(left).split(" ");
  const little = left < total * LITTLE;
  return labelled(label, `free${little ? " note warn" : ""}`,
    `${little ? "! " : ""}${words.endsWith(` ${unit}`) ? value : `${value} ${unit}`} of ${words}`);
}

function nodeRows(node) {
  const identity = node.identity ?? {};
  const facts = node.facts ?? {};
  const labels = Object.entries(identity.labels ?? {}).map(([label, value]) => `${line(label)}: ${line(value)}`);
  const here = list(node.weights).filter((weights) => weights.phase === "whole");
  const moving = list(node.weights).filter((weights) => weights.phase !== "whole");
  const known = factLine(node);
  return rows("node", node.name, troublesOf(node),
    row(
      first(true, name(node.name),
        small(join(line(identity.address), identity.agent_version && `llmgw ${line(identity.agent_version)}`)),
        labels.length > 0 && small(labels.join(", "))),
      el("td", { role: "cell", class: "state", rowspan: 2 }, badge(node.state), node.draining && badge("draining"),
        small(`heard ${age(node.seen_seconds_ago)} ago`)),
      cell("wide", el("ul", { class: "facts" }, known.length > 0
        ? known.map((fact) => el("li", {}, fact)) : el("li", {}, "nothing is known of this machine yet"))),
      free("memory free", facts.memory_available_bytes, facts.memory_total_bytes),
      free("disk free", facts.disk_free_bytes, facts.disk_total_bytes),
      labelled("replicas", "number", String(list(node.replicas).length))),
    row(below(4,
      el("ul", { class: "says" },
        nodeNotes(node).map(([kind, text]) => note(kind, text)),
        list(node.engines).map(engineItem),
        node.probed && list(node.engines).length === 0 && note("idle", "has no engine"),
        moving.map(weightsItem),
        here.length > 0 && el("li", { key: "whole" }, badge("whole"), el("div", {},
          el("span", { class: "thing" }, "weights "),
          unique(here.map((weights) => weights.name)).map((one, index) => [index > 0 && ", ", name(one)])))))));
}


// ---- replicas -------------------------------------------------------------------------------------

function placeOf(shard) {
  const gpus = list(shard.gpus).map((gpu) => gpu.index);
  return [link("node", shard.node), small(gpus.length ? ` GPU ${gpus.join(", ")}` : " CPU")];
}

function failureOf(replica, shard) {
  const failure = shard.observed?.first_failure;
  if (!failure) return null;
  return el("details", { key: `failure ${shard.rank}` },
    el("summary", {}, `first failure on ${line(shard.node)}, ${moment(failure.at)}`),
    el("dl", {},
      el("dt", {}, "what"), el("dd", {}, line(failure.message) || "–"),
      failure.command && [el("dt", {}, "command"), el("dd", {}, el("code", {}, line(failure.command)))]),
    failure.log_tail && el("pre", { tabindex: 0, "aria-label": "the end of its log" }, lines(failure.log_tail)));
}

function replicaRows(replica) {
  const gauges = replica.gauges ?? {};
  const shards = list(replica.shards);
  const restarts = sum(shards.map((shard) => shard.observed?.restarts ?? 0));
  const message = replica.state === "ready" ? "" : line(replica.message);
  const others = shards.map((shard) => [shard, line(shard.observed?.message)])
    .filter(([, said]) => said && shards.length > 1 && said !== message)
    .map(([shard, said]) => `rank ${shard.rank} on ${line(shard.node)}: ${said}`);
  const notes = [message, ...others].filter(Boolean);
  const ending = { drain: "draining", stop: "stopping" }[replica.wish];
  if (ending === "draining") notes.push("takes no new requests and ends when it has none left");
  if (restarts > 0) notes.push(several(restarts, "restart", "restarts"));
  const failures = shards.map((shard) => failureOf(replica, shard)).filter(Boolean);
  const more = notes.length > 0 || failures.length > 0;
  return rows("replica", replica.id, [kindOf(replica.state)],
    row(
      first(more, name(replica.id)),
      cell("state", badge(replica.state),
        ending && !["draining", "stopping", "stopped"].includes(replica.state) && badge(ending)),
      labelled("model", "", link("model", replica.model)),
      labelled("node", "", shards.length === 0 ? "–" : shards.map((shard, index) => [index > 0 && ", ", placeOf(shard)])),
      labelled("engine", "", join(line(replica.engine), line(replica.engine_version))),
      labelled("in flight", "number", number(replica.gauges?.in_flight)),
      labelled("running", "number", number(gauges.running)),
      labelled("waiting", "number", number(gauges.waiting)),
      labelled("KV cache", "number", typeof gauges.kv_used === "number" ? `${Math.round(gauges.kv_used * 100)} %` : "–"),
      labelled("age", "number", replica.created_at > 0 ? age(Date.now() / 1000 - replica.created_at) : "–")),
    more && row(below(9, notes.length > 0 && sentences(notes), failures)));
}


// ---- engines and events ---------------------------------------------------------------------------

function engineRows(engine) {
  const nodes = list(engine.nodes);
  const usable = nodes.filter(([, seen]) => seen.usable).length;
  const groups = new Map();
  for (const [node, seen] of nodes) {
    const word = seen.phase === "installed" && !seen.usable ? "not seen to run" : line(seen.phase);
    if (!groups.has(word)) groups.set(word, [engineKind(seen), []]);
    groups.get(word)[1].push(node);
  }
  const able = nodes.filter(([, seen]) => seen.phase !== "skipped").length;
  const assets = list(engine.assets).length;
  return rows("engine", `${engine.name} ${engine.version}`, [],
    row(
      first(false, name(join(engine.name, engine.version)),
        small(assets > 0 ? `${several(assets, "file", "files")} of the release known` : "")),
      cell("state", badge(nodes.length === 0 ? "on no node" : `${usable} of ${able}`,
        nodes.length === 0 || able === 0 ? "idle" : usable === able ? "good" : usable > 0 ? "warn" : "busy")),
      cell("wide", el("ul", { class: "says" },
        assets === 0 && engine.assets_problem && note("warn", engine.assets_problem),
        [...groups].map(([word, [kind, members]]) => el("li", { key: word }, badge(word, kind),
          el("div", {}, members.map((node, index) => [index > 0 && ", ", link("node", node)]))))))));
}

function eventItem(event) {
  const when = new Date((event.at ?? 0) * 1000);
  const machine = Number.isNaN(when.getTime()) ? null : when.toISOString();
  return el("li", { key: event.id },
    el("time", { datetime: machine, title: machine }, moment(event.at)),
    el("span", { class: "subject" }, name(event.subject)),
    el("span", { class: "reason" }, line(event.reason)),
    el("span", { class: "message" }, line(event.message) || line(event.reason)));
}


// ---- the whole --------------------------------------------------------------------------------------

const state = { token: "", data: null, fetchedAt: null, events: [], after: 0, onlyTroubled: false, asking: null, timer: 0 };

/** Return what concerns the whole cluster. */
function notices(data) {
  const held = list(data.held);
  return [
    data.problem && note("bad", `server.yaml cannot be used as it is, the last good one stays in force: ${data.problem}`),
    held.length > 0 && note("warn", `a new server.yaml waits for an admin (llmgw.pyz ctl apply): ${held.join("; ")}`),
  ].filter(Boolean);
}

function summary(data) {
  const ready = data.nodes.filter((node) => node.state === "ready").length;
  const troubled = data.nodes.filter(needsAttention).length;
  const wanted = data.models.filter((model) => model.wanted > 0);
  const served = wanted.filter((model) => model.ready > 0).length;
  const short = wanted.filter((model) => model.ready < model.wanted).length;
  const replicasReady = data.replicas.filter((replica) => replica.state === "ready").length;
  const failing = data.replicas.filter((replica) => ["bad", "warn"].includes(kindOf(replica.state))).length;
  const installs = data.engines.flatMap((engine) => list(engine.nodes)).filter(([, seen]) => seen.phase !== "skipped");
  const usable = installs.filter(([, seen]) => seen.usable).length;
  const moving = installs.filter(([, seen]) => engineKind(seen) === "busy").length;
  const stuck = installs.length - usable - moving;
  const gauges = data.replicas.map((replica) => replica.gauges).filter(Boolean);
  const flight = sum(gauges.map((one) => one.in_flight ?? 0));
  const waiting = sum(gauges.map((one) => one.waiting ?? 0));
  return [
    tile("models", "Models", served, wanted.length, "served", short > 0 && ["warn", several(short, "lacks replicas", "lack replicas")]),
    tile("nodes", "Nodes", ready, data.nodes.length, "ready", troubled > 0 && ["warn", several(troubled, "needs attention", "need attention")]),
    tile("replicas", "Replicas", replicasReady, data.replicas.length, "ready", failing > 0 && ["bad", `${failing} failing`]),
    tile("engines", "Engines on nodes", usable, installs.length, "usable",
      stuck > 0 ? ["warn", `${stuck} not usable`] : moving > 0 && ["idle", `${moving} being installed`]),
    el("a", { key: "requests", href: "#replicas" }, el("span", { class: "what" }, "Requests"),
      el("span", { class: "count" }, gauges.length > 0 ? number(flight) : "–", small(" in flight")),
      el("span", { class: "note" }, waiting > 0 && `${number(waiting)} waiting in engines`)),
  ];
}

function tile(where, title, some, all, word, remark) {
  return el("a", { key: where, href: `#${where}` },
    el("span", { class: "what" }, title),
    el("span", { class: "count" }, all > 0 ? [String(some), small(` of ${all} ${word}`)] : ["0", small(` ${word}`)]),
    el("span", { class: `note ${remark ? remark[0] : ""}` }, remark ? `${remark[0] === "idle" ? "" : "! "}${remark[1]}` : ""));
}

function section(id, holder, items, empty) {
  at(`${id}-empty`).hidden = items.length > 0;
  if (items.length === 0) fill(at(`${id}-empty`), empty);
  holder.hidden = items.length === 0;
  fill(holder, items);
}

function show() {
  const { data } = state;
  const byName = (one, other) => String(one.name).localeCompare(String(other.name), "en", { numeric: true });
  const nodes = [...data.nodes].sort(byName);
  const troubled = nodes.filter(needsAttention);
  const said = notices(data);
  at("notices").hidden = said.length === 0;
  fill(at("notices"), said);
  fill(at("summary"), summary(data));
  section("models", at("models-table"), [...data.models].sort(byName).map((model) => modelRows(model, data)),
    ["no model is wanted yet: name one under ", el("code", {}, "models:"), " in server.yaml"]);
  section("nodes", at("nodes-table"), (state.onlyTroubled ? troubled : nodes).map(nodeRows),
    nodes.length > 0 ? "no node needs attention" : ["no node has joined yet: start one with ",
      el("code", {}, `llmgw.pyz agent --server ${location.origin} --token-file FILE`),
      ", where FILE holds what ", el("code", {}, "tokens/node"), " in the control plane's data directory holds"]);
  fill(at("nodes-note"), data.suspicion ? `no node is given up just now: ${line(data.suspicion)}` : "");
  fill(at("nodes-some"), `need attention (${troubled.length})`);
  fill(at("nodes-all"), `all (${nodes.length})`);
  section("replicas", at("replicas-table"), data.replicas.map(replicaRows),
    data.models.length > 0 ? "no replica yet: the models above say why" : "no replica: no model is wanted yet");
  section("engines", at("engines-table"), data.engines.map(engineRows),
    ["no engine is wanted: ", el("code", {}, "engines:"), " in server.yaml is empty"]);
  section("events", at("events-list"), state.events.slice(-EVENTS_SHOWN).reverse().map(eventItem), "nothing has happened yet");
  document.title = `llmgw: ${data.nodes.filter((node) => node.state === "ready").length}/${data.nodes.length} nodes, ${
    data.models.filter((model) => model.ready > 0).length}/${data.models.filter((model) => model.wanted > 0).length} models`;
}

function status(kind, words, time) {
  at("status").className = kind;
  at("status").title = kind === "bad" ? words : "";     // where a narrow window cuts it off
  fill(at("status-words"), words);
  fill(at("status-time"), time);
}

function showStatus(problem) {
  const known = state.fetchedAt ? clock(state.fetchedAt) : "";
  at("cluster").classList.toggle("stale", Boolean(problem));
  if (!problem) return status("good", "up to date", known);
  status("bad", problem, known ? `shown as of ${known}, asking again` : "asking again");
}


// ---- asking the control plane -------------------------------------------------------------------------

class Refused extends Error {}       // this token opens nothing here
class Trouble extends Error {}       // an answer, but not the one that was asked for

/** Return one list and what comes with it; raises Refused, Trouble, or what fetch raises when nobody answers. */
async function ask(path, signal) {
  const answer = await fetch(path, {
    signal, cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
    headers: { Authorization: `Bearer ${state.token}` },
  });
  let body = null;
  try { body = await answer.json(); } catch (error) { if (error.name === "AbortError" || error.name === "TimeoutError") throw error; }
  if (answer.ok && Array.isArray(body?.items)) return body;
  const said = line(body?.message) || `something other than the control plane answers here (HTTP ${answer.status})`;
  const hint = line(body?.hint);
  const words = hint ? `${said} (${hint})` : said;
  if (answer.status === 401) throw new Refused(said);
  if (answer.status === 403) throw Object.assign(new Trouble(words), { forbidden: true });
  throw new Trouble(answer.ok ? "the control plane answers what this page cannot read" : words);
}

function takeEvents(items) {
  const known = new Map((state.after > 0 ? state.events : []).map((event) => [event.id, event]));
  for (const event of items) known.set(event.id, event);
  state.events = [...known.values()].sort((one, other) => one.id - other.id).slice(-EVENTS_KEPT);
  state.after = state.events.length > 0 ? state.events[state.events.length - 1].id : 0;
}

/** Ask for every list once, and show what came; what did not come stays as it was, and is named. */
async function refresh() {
  clearTimeout(state.timer);
  state.asking?.abort();
  const asking = new AbortController();
  state.asking = asking;
  const limit = setTimeout(() => asking.abort(), TIMEOUT_MS);
  const names = Object.keys(LISTS);
  const answers = await Promise.allSettled(names.map((one) =>
    ask(one === "events" && state.after > 0 ? `${LISTS[one]}?after=${state.after}` : LISTS[one], asking.signal)));
  clearTimeout(limit);
  if (state.asking !== asking) return;            // a newer one was started, or the token was forgotten
  state.asking = null;
  try {
    take(names, answers);
  } catch (error) {
    showStatus(`this page cannot show what came: ${line(error?.message)}`);
  }
  if (state.token && !document.hidden) state.timer = setTimeout(refresh, EVERY_MS);
}

function take(names, answers) {
  const failed = answers.map((answer) => (answer.status === "rejected" ? answer.reason : null));
  const refused = failed.find((reason) => reason instanceof Refused)
    ?? (failed.every((reason) => reason?.forbidden) ? failed[0] : null);
  if (refused) return leave(refused.message);
  const silent = failed.find((reason) => reason && !(reason instanceof Trouble));
  if (silent || failed.every(Boolean)) {
    state.after = 0;                               // it may come back with another history
    return showStatus(silent ? "the control plane does not answer" : failed[0].message);
  }
  const data = state.data ?? { models: [], nodes: [], replicas: [], engines: [], events: [] };
  names.forEach((one, index) => {
    fill(at(`${one}-trouble`), failed[index] ? line(failed[index].message) : "");
    if (failed[index]) return;
    const body = answers[index].value;
    data[one] = body.items.filter((item) => item !== null && typeof item === "object");
    if (one === "models") Object.assign(data, { problem: body.config_problem, held: body.held });
    if (one === "nodes") data.suspicion = body.suspicion;
  });
  if (!failed[names.indexOf("events")]) takeEvents(data.events);
  state.data = data;
  state.fetchedAt = new Date();
  show();
  at("cluster").hidden = false;
  showStatus("");
}


// ---- the token ----------------------------------------------------------------------------------------

function kept() {
  try { return sessionStorage.getItem(TOKEN) ?? ""; } catch { return ""; }
}

function keep(token) {
  try {
    if (token) sessionStorage.setItem(TOKEN, token);
    else sessionStorage.removeItem(TOKEN);
  } catch { /* a browser that keeps nothing: the token lives as long as this page */ }
}

function why(token) {
  if (/[^\x21-\x7e]/.test(token)) return "a token is one word of plain letters and digits, like llmgw_viewer_…";
  if (token.startsWith("llmgw_infer_")) return "this is a key for using models; the page needs a viewer's or an admin's token";
  return "";
}

/** Forget the token and everything that it opened, and ask again. */
function leave(reason) {
  state.asking?.abort();
  clearTimeout(state.timer);
  Object.assign(state, { token: "", data: null, fetchedAt: null, events: [], after: 0, asking: null });
  keep("");
  at("cluster").hidden = true;
  for (const one of Object.keys(LISTS)) fill(at(one === "events" ? "events-list" : `${one}-table`));
  fill(at("summary"));
  at("leave").hidden = true;
  at("ask").hidden = false;
  fill(at("refused"), line(reason));
  document.title = "llmgw";
  status("idle", "", "");
  at("token").value = "";
  at("token").focus();
}

function enter(token) {
  state.token = token;
  at("ask").hidden = true;
  at("leave").hidden = false;
  at("content").focus({ preventScroll: true });
  status("busy", "asking the control plane", "");
  refresh();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = at("token").value.trim();
  const problem = token ? why(token) : "a token is needed";
  fill(at("refused"), problem);
  if (problem) return;
  at("token").value = "";
  keep(token);
  enter(token);
});

at("leave").addEventListener("click", () => leave(""));

for (const [id, only] of [["nodes-all", false], ["nodes-some", true]]) {
  at(id).addEventListener("click", () => {
    state.onlyTroubled = only;
    at("nodes-all").setAttribute("aria-pressed", String(!only));
    at("nodes-some").setAttribute("aria-pressed", String(only));
    if (state.data) show();
  });
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && state.token) refresh();
});

if (kept()) enter(kept());
else leave("");
