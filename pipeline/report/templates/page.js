const ANY = "";
const LEAST = Math.log(0.01); // log-probability of the strongest colour
const FILTERS = {
  stage: (group) => [group.stage],
  step: (group) => [String(group.step)],
  domain: (group) => [group.domain],
  family: (group) => [group.branch ? `${group.family}/${group.branch}` : group.family],
  task: (group) => [group.task],
  outcome: (group) => [group.outcome],
  episode: (group) => [...new Set(group.episodes.flat())],
};

const NAMES = Object.keys(FILTERS);
// Which choices make way, first to last, where nothing has all of them.
const GIVEN_UP = ["task", "step", "family", "domain", "episode", "outcome", "stage"];

function markCut(root) {
  for (const box of root.querySelectorAll(".scroll")) {
    const mark = () => box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.addEventListener("scroll", mark);
    new ResizeObserver(mark).observe(box);
  }
}

markCut(document);
const isLive = document.body.classList.contains("live");

let successThreshold = 1; // the reward from which an episode is solved
let meanings = {}; // domain -> meaning of each part of the reward
let unseen = {}; // role -> how much of its texts the chat template leaves out of prompts
const isSuccess = (reward) => reward >= successThreshold - 1e-9 * Math.abs(successThreshold);

function readIndex() {
  const index = JSON.parse(byId("index").textContent);
  successThreshold = index.success_threshold;
  meanings = index.meanings;
  unseen = index.unseen;
  const places = new Map();
  return index.groups.map(([stage, step, chunk, domain, family, branch, task, rewards, stops]) => {
    const place = places.get(chunk) ?? 0;
    places.set(chunk, place + 1);
    const solved = rewards.filter(isSuccess).length;
    const outcome = { 0: "none solved", [rewards.length]: "all solved" }[solved] ?? "some solved";
    const episodes = rewards.map((reward, i) => [isSuccess(reward) ? "solved" : "not solved", stops[i]]);
    const name = index.stages[stage];
    return { stage: name, step, chunk, place, domain, family, branch, task, outcome, episodes };
  });
}

function stageName(stage) {
  return stage.startsWith("evaluation-")
    ? `evaluation: ${stage.slice("evaluation-".length).replace("_", " ")}`
    : stage;
}

class Reader {
  constructor() {
    this.groups = readIndex();
    this.chunks = new Map();
    this.chosen = Object.fromEntries(NAMES.map((name) => [name, ANY]));
    this.current = null;
    this.follows = isLive; // the newest group, until the reader chooses one
    for (const name of NAMES) {
      byId(name).addEventListener("change", (event) => this.choose(name, event.target.value));
    }
    byId("previous").addEventListener("click", () => this.move(-1));
    byId("next").addEventListener("click", () => this.move(1));
    byId("reset").addEventListener("click", () => this.clear());
    byId("modes").addEventListener("change", () => this.show(this.current));
    byId("group").addEventListener("click", describeToken);
    byId("group").addEventListener("mouseover", describeToken);
    addEventListener("hashchange", () => this.follow());
    this.follow(true);
  }

  matching(names = NAMES) {
    const wanted = names.filter((name) => this.chosen[name] !== ANY);
    return this.groups.filter((group) =>
      wanted.every((name) => FILTERS[name](group).includes(this.chosen[name])));
  }

  choose(name, value) {
    this.follows = false;
    this.chosen[name] = value;
    for (const other of GIVEN_UP.filter((other) => other !== name)) {
      if (this.matching().length) break;
      this.chosen[other] = ANY;
    }
    this.fill();
    const found = this.matching();
    this.show(found.includes(this.current) ? this.current : found[0] ?? null);
  }

  clear() {
    for (const name of NAMES) this.chosen[name] = ANY;
    this.fill();
    this.show(this.current ?? this.groups[0]);
  }

  move(by) {
    this.follows = false;
    const found = this.matching();
    this.show(found[found.indexOf(this.current) + by]);
  }

  // Each list offers what the choices before it leave, with the number of groups that all leave.
  fill() {
    NAMES.forEach((name, i) => {
      const counts = new Map();
      for (const group of this.matching(NAMES.slice(0, i))) {
        for (const value of FILTERS[name](group)) counts.set(value, 0);
      }
      const found = this.matching(NAMES.filter((other) => other !== name));
      for (const group of found) {
        for (const value of FILTERS[name](group)) counts.set(value, (counts.get(value) ?? 0) + 1);
      }
      const values = [...counts.keys()];
      if (name !== "stage") {
        values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      }
      const options = values.map((value) => {
        const words = name === "stage" ? stageName(value) : value;
        // An option has no elements, so characters isolate its direction.
        const isolated = /[^\0-\x7f]/.test(words) ? `\u2068${visible(words)}\u2069` : visible(words);
        return new Option(`${isolated} (${counts.get(value)})`, value);
      });
      byId(name).replaceChildren(new Option(`any (${found.length})`, ANY), ...options);
      byId(name).value = this.chosen[name];
    });
  }

  // The address names a group; one that it does not name is the first with both outcomes.
  follow(isFirst = false) {
    const [anchor, query] = location.hash.split("?");
    if (anchor !== "#episodes" && !isFirst) return;
    const wanted = new URLSearchParams(query ?? "");
    const named = this.groups.find((group) =>
      ["stage", "step", "domain", "task"].every((name) => String(group[name]) === wanted.get(name)));
    const mode = document.querySelector(`#modes input[value="${CSS.escape(wanted.get("tokens") ?? "")}"]`);
    if (mode) mode.checked = true;
    this.fill();
    if (named) this.follows = false;
    if (named || !this.current) this.show(named ?? this.telling());
    if (named && isFirst) byId("episodes").scrollIntoView();
  }

  // A group of training with good and bad episodes: the first, or the newest of a run that goes on.
  telling() {
    const isTelling = (group) => !group.stage.startsWith("evaluation-") && group.outcome === "some solved";
    const found = this.groups.filter(isTelling);
    return isLive ? found.at(-1) ?? this.groups.at(-1) : found[0] ?? this.groups[0];
  }

  // The page has another index and other chunks.
  renew() {
    const key = ({ stage, step, domain, task }) => JSON.stringify([stage, step, domain, task]);
    const before = this.current && key(this.current);
    this.groups = readIndex();
    this.chunks = new Map();
    this.fill();
    const kept = this.follows ? null : this.groups.find((group) => key(group) === before);
    this.show(kept ?? this.telling());
  }

  async chunk(number) {
    const chunks = this.chunks; // those of this version of the page
    if (!chunks.has(number)) {
      const bytes = Uint8Array.from(atob(byId(`chunk-${number}`).textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      chunks.set(number, await new Response(stream).json());
    }
    return chunks.get(number);
  }

  async show(group) {
    this.current = group;
    const found = this.matching();
    const place = found.indexOf(group);
    byId("previous").disabled = place <= 0;
    byId("next").disabled = place < 0 || place + 1 >= found.length;
    if (!group) {
      byId("place").textContent = "No group has all of this; choose less.";
      byId("group").replaceChildren();
      return;
    }
    byId("place").textContent = `Group ${place + 1} of ${found.length}`;
    const chunk = await this.chunk(group.chunk);
    if (this.current !== group) return; // another was chosen meanwhile
    const mode = document.querySelector("#modes input:checked").value;
    const matches = (i) => this.chosen.episode !== ANY && group.episodes[i].includes(this.chosen.episode);
    const episodes = chunk.groups[group.place];
    byId("group").replaceChildren(...groupParts(group, episodes, chunk.texts, mode, matches));
    byId("group").dataset.shown = `${group.stage} ${group.step} ${group.domain} ${group.task}`;
    byId("token").textContent = "";
    document.querySelector(".episode.match")?.scrollIntoView({ block: "nearest", inline: "start" });
    const names = ["stage", "step", "domain", "task"].map((name) => [name, group[name]]);
    this.name(new URLSearchParams([...names, ["tokens", mode]]));
  }

  // Not before a choice: the page may have been opened for something else.
  name(query) {
    if (this.named || location.hash.startsWith("#episodes?")) {
      history.replaceState(null, "", `#episodes?${query}`);
    }
    this.named = true;
  }
}

function groupParts(group, episodes, texts, mode, matches) {
  const scale = Math.max(1, ...episodes.map((episode) => Math.abs(episode.advantage ?? 0)));
  byId("legend").replaceChildren(...legend(mode, scale, episodes));
  const shared = sharedCount(episodes);
  const where = group.branch ? `${group.family}/${group.branch}` : group.family;
  const title = [stageName(group.stage), `step ${group.step}`, group.domain, where, group.task, group.outcome];
  const parts = [lineOf("h3", "", " \u00b7 ", ...title.filter(Boolean))];
  if (shared) parts.push(sharedContext(episodes[0].messages.slice(0, shared), texts));
  if (meanings[group.domain]) parts.push(partsBox(Object.entries(meanings[group.domain])));
  const strip = element("div", "strip");
  strip.tabIndex = 0;
  episodes.forEach((episode, i) => {
    const card = episodeCard(episode, shared, texts, mode, scale);
    if (matches(i)) card.classList.add("match");
    strip.append(card);
  });
  return [...parts, strip];
}

// How many messages at the beginning are the same context in all episodes.
function sharedCount(episodes) {
  const first = episodes[0].messages;
  let count = 0;
  while (count < first.length && first[count].role !== "assistant"
    && episodes.every(({ messages }) => messages[count]?.role === first[count].role
      && messages[count].text === first[count].text)) count += 1;
  return count;
}

function sharedContext(messages, texts) {
  const box = element("details", "shared");
  box.open = messages.every((message) => texts[message.text].length < 400);
  box.append(element("summary", "", "What all episodes begin with (context, masked)"));
  box.append(...messages.map((message) => messageBox(message, texts, "plain")));
  const last = messages.at(-1);
  if (box.open || last.role === "system") return box;
  const whole = element("div", "shared");
  box.replaceChildren(box.firstChild, ...messages.slice(0, -1).map((m) => messageBox(m, texts, "plain")));
  whole.append(box, messageBox(last, texts, "plain"));
  return whole;
}

function partsBox(entries) {
  const box = element("details", "shared");
  box.append(element("summary", "", "The parts of the reward"));
  box.append(table([], entries));
  return box;
}

function signed(value) {
  return `${value < 0 ? "-" : "+"}${Math.abs(value).toFixed(2)}`;
}

function episodeCard(episode, shared, texts, mode, scale) {
  const card = element("article", "episode");
  const head = element("h4", "", `Trial ${episode.trial} `);
  head.append(element("span", `badge ${isSuccess(episode.reward) ? "solved" : "failed"}`, `reward ${episode.reward}`));
  card.append(head);
  const facts = [episode.stop_reason, `${episode.num_turns} turns`, `${episode.num_sampled_tokens} sampled tokens`];
  if (episode.advantage !== null) facts.push(`advantage ${signed(episode.advantage)}`);
  card.append(element("p", "facts", facts.join(" \u00b7 ")));
  const leftOut = episode.left_out ? ` (left out of training: ${episode.left_out})` : "";
  if (episode.error) card.append(lineOf("p", "failed", "", episode.error, leftOut));
  for (const message of episode.messages.slice(shared)) {
    card.append(messageBox(message, texts, mode, episode.advantage, scale));
  }
  const rewards = Object.entries(episode.rewards).map(([name, value]) => [name, value ?? "none"]);
  if (rewards.length) card.append(element("h5", "", "Rewards by name; their weighted sum is the reward"), table([], rewards));
  const extra = Object.entries(episode.extra).map(([name, text]) => [name, texts[text]]);
  if (extra.length) card.append(element("h5", "", "Logged by reward functions"), table([], extra));
  const parts = Object.entries(episode.parts);
  if (parts.length) card.append(element("h5", "", "Parts of the reward"), table([], parts));
  const differences = Object.entries(episode.difference).map(([what, pair]) => [what, ...pair]);
  if (rewards.length && !differences.length) return card;
  card.append(element("h5", "", "Database at the end"));
  card.append(differences.length
    ? table(["where", "found", "expected"], differences)
    : element("p", "facts", episode.parts.database === 0 ? "not recorded" : "no difference recorded"));
  return card;
}

function table(header, rows) {
  const made = element("table");
  const line = (cells, tag) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element(tag, "words", String(cell))));
    return row;
  };
  if (header.length) made.append(line(header, "th"));
  made.append(...rows.map((row) => line(row, "td")));
  return made;
}

function messageBox(message, texts, mode, advantage, scale) {
  const isSampled = message.role === "assistant";
  const box = element("div", isSampled ? "message sampled" : "message");
  const left = unseen[message.role];
  const hidden = left ? ` (the chat template leaves ${left} of it out)` : "";
  const name = message.role === "tool" ? `result of ${message.name ?? "a tool"}`
    : message.role + hidden;
  box.append(lineOf("div", "role", ", ", ...(isSampled ? [name, "sampled"] : [name])));
  const text = element("div", "text");
  box.append(text);
  if (message.tokens && mode !== "plain") {
    message.tokens.forEach((token, i) => {
      text.append(tokenSpan(texts[token], message.logprobs[i], mode, advantage, scale));
    });
    return box;
  }
  if (message.thoughts !== undefined) text.before(element("div", "facts", `thoughts: ${visible(texts[message.thoughts])}`));
  text.textContent = visible(texts[message.text]);
  for (const [tool, values] of message.calls ?? []) {
    const call = lineOf("div", "call", "(", texts[tool], texts[values]);
    call.append(")");
    box.append(call);
  }
  return box;
}

function tokenSpan(text, logprob, mode, advantage, scale) {
  const span = element("span", "", text);
  span.token = { text, logprob, advantage };
  span.style.background = mode === "advantage" ? advantageColour(advantage, scale) : logprobColour(logprob);
  return span;
}

function advantageColour(advantage, scale) {
  if (!advantage) return "transparent";
  return tint(advantage > 0 ? "plus" : "minus", Math.abs(advantage) / scale);
}

function logprobColour(logprob) {
  return tint("unlikely", Math.min(1, logprob / LEAST));
}

// Half of a colour at most, so that text on it stays legible.
function tint(name, share) {
  return `color-mix(in srgb, var(--${name}) ${(50 * share).toFixed(1)}%, transparent)`;
}

function describeToken(event) {
  const token = event.target.token;
  if (!token) return;
  const words = [`token ${JSON.stringify(token.text)}`];
  words.push(`probability ${Math.exp(token.logprob).toPrecision(2)} (log ${signed(token.logprob)})`);
  if (typeof token.advantage === "number") words.push(`advantage ${signed(token.advantage)}`);
  byId("token").replaceChildren(lineOf("span", "", ", ", ...words));
}

function legend(mode, scale, episodes) {
  const hasTokens = episodes.some(({ messages }) => messages.some((message) => message.tokens));
  if (!hasTokens) return [element("span", "", "No checkpoint has a tokenizer file: tokens cannot be shown.")];
  const mask = "Dotted line: tokens that the policy sampled, which training counts. Grey box: context, masked out.";
  if (mode === "plain") return [element("span", "", "Plain text; calls of tools as they were read.")];
  if (mode === "logprob") {
    return [scaleOf("likely, 1", [0, 1].map((x) => logprobColour(x * LEAST)), "0.01 or less"), element("span", "", mask)];
  }
  if (episodes.every((episode) => episode.advantage === null)) {
    return [element("span", "", "An evaluation has no advantages; log-probability can be shown."), element("span", "", mask)];
  }
  const ends = [-scale, 0, scale].map((x) => advantageColour(x, scale));
  return [scaleOf(`${signed(-scale)} made rarer`, ends, `${signed(scale)} made likelier`), element("span", "", mask)];
}

function scaleOf(low, colours, high) {
  const whole = element("span", "", low);
  const bar = element("span", "scale");
  bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
  whole.append(bar, high);
  return whole;
}

// The page of a run that goes on, served by `watch`.
class Live {
  constructor() {
    this.reader = byId("index") ? new Reader() : null;
    this.version = Number(document.body.dataset.version);
    this.ask();
  }

  async ask() {
    try {
      const { version, html } = await (await fetch(`now${location.search}`)).json();
      byId("now").replaceWith(this.parsed(html).querySelector("section"));
      markCut(byId("now"));
      if (version !== this.version) await this.renew();
      this.version = version;
      byId("live").textContent = "";
    } catch {
      byId("live").textContent = "The page's server does not answer, or began anew with another address; what is shown is old.";
    }
    setTimeout(() => this.ask(), 2000);
  }

  parsed(html) {
    return new DOMParser().parseFromString(html, "text/html");
  }

  // All but the reader, which keeps what was chosen.
  async renew() {
    const page = this.parsed(await (await fetch(`./${location.search}`)).text());
    const episodes = page.getElementById("episodes");
    const kept = byId("episodes");
    if (kept && episodes) {
      kept.querySelector("p").replaceWith(episodes.querySelector("p")); // how many there are
      episodes.replaceWith(kept);
    } else this.reader = null;
    const top = scrollY;
    document.querySelector("nav").replaceWith(page.querySelector("nav"));
    document.querySelector("main").replaceWith(page.querySelector("main"));
    for (const old of document.querySelectorAll("body > script[type]")) old.remove();
    document.body.append(...page.querySelectorAll("body > script[type]"));
    markCut(document.querySelector("main"));
    scrollTo(0, top);
    if (!byId("index")) return;
    if (this.reader) this.reader.renew();
    else this.reader = new Reader();
  }
}

if (isLive) new Live();
else if (byId("index")) new Reader();
