// The strip of all ranks: one cell each, in the colour of its group, with the sign of its
// condition.

function cellTitle(rank) {
  const entry = RANKS.get(rank);
  const condition = conditionOf(rank);
  const parts = [`rank ${rank}`];
  if (containsRank(CULPRITS, rank)) parts.push("culprit");
  if (condition === "alive" && entry) parts.push(D.texts[entry.last.state]);
  else parts.push(CONDITIONS[condition].label);
  if (absentOf(rank)?.why) parts.push(absentOf(rank).why);
  if (nodeOf(rank)) parts.push(`on ${nodeOf(rank)}`);
  const group = groupOf(rank);
  if (group) parts.push(`in ${nameOf(group)}`);
  return parts.join(", ");
}

function buildStrip() {
  const strip = byId("strip");
  const count = Math.min(HIGHEST, MOST_CELLS);
  strip.classList.add(count <= 64 ? "large" : count <= 300 ? "medium" : "small");
  const cells = [];
  for (let rank = 0; rank < count; rank++) {
    const condition = conditionOf(rank);
    const colour = containsRank(CULPRITS, rank) ? "culprit" : (groupOf(rank)?.colour ?? "none");
    const { sign } = CONDITIONS[condition];
    cells.push(
      el(
        "span",
        {
          class: `cell ${colour} ${condition}`,
          role: "option",
          id: `cell-${rank}`,
          tabindex: rank === 0 ? "0" : "-1",
          "aria-selected": "false",
          "aria-label": cellTitle(rank),
          title: cellTitle(rank),
          "data-rank": rank,
        },
        el("span", { class: "number" }, `${rank}`),
        sign && el("span", { class: "sign" }, sign),
      ),
    );
  }
  strip.append(...cells);
  strip.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) openRank(Number(cell.dataset.rank));
  });
  strip.addEventListener("keydown", (event) => {
    const at = cells.indexOf(document.activeElement);
    if (at < 0) return;
    const top = cells[0].offsetTop;
    const across = Math.max(1, cells.findIndex((cell) => cell.offsetTop > top));
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -at, End: cells.length - 1 - at };
    if (event.key === "Enter" || event.key === " ") openRank(at);
    else if (event.key in steps) {
      const to = cells[Math.min(cells.length - 1, Math.max(0, at + steps[event.key]))];
      focusOnly(strip, to);
      to.focus();
    } else return;
    event.preventDefault();
  });
  if (HIGHEST > count) byId("strip-hint").textContent = `Only the first ${count.toLocaleString("en")} ranks are drawn. The tables contain all ranks.`;
  listeners.push((changes) => {
    const shown = view.frame?.runs ?? null;
    for (const [rank, cell] of cells.entries()) {
      if ("filter" in changes) cell.classList.toggle("off", view.filter !== null && !containsRank(view.filter, rank));
      if ("frame" in changes) {
        cell.classList.toggle("in", shown !== null && containsRank(shown, rank));
        cell.classList.toggle("out", shown !== null && !containsRank(shown, rank));
      }
      if ("rank" in changes) cell.setAttribute("aria-selected", `${view.rank === rank}`);
    }
    if ("frame" in changes || "filter" in changes) drawFilter();
  });
}

/** The limits of the view, and the ranks of the chosen frame. */
function drawFilter() {
  const line = byId("filter");
  const parts = [];
  if (view.filter) {
    parts.push(
      el("span", { class: "chip strong" }, `Only ${ranksText(view.filter, 6)}: ${view.why}`),
      el("button", { type: "button", class: "small", id: "clear-filter", onclick: () => onlyRanks(null, "") }, "Show all ranks"),
    );
  }
  if (view.frame) {
    const rest = complement(view.frame.runs, WORLD);
    parts.push(
      el("span", { class: "chip" }, el("i", { class: "key in" }), `${sizeOf(view.frame.runs)} in this stack`),
      el("span", { class: "chip" }, el("i", { class: "key out" }), `${sizeOf(rest)} not in it`),
    );
  }
  line.replaceChildren(...parts);
}

function buildLegend() {
  const entries = [];
  // Culprits come first.
  const chip = (colour, text, runs, why) =>
    el(
      "button",
      { type: "button", class: "chip", title: `Show only ${ranksText(runs)}`, onclick: () => onlyRanks(runs, why) },
      el("i", { class: `key ${colour}` }),
      text,
    );
  if (CULPRITS.length) {
    entries.push(chip("culprit", `culprit (${sizeOf(CULPRITS)})`, CULPRITS, "culprits"));
  }
  for (const group of GROUPS.filter(({ colour }) => colour !== "rest").slice(0, COLOURS + 2)) {
    if (group.colour === "culprit") continue;
    entries.push(chip(group.colour, `in ${nameOf(group)} (${sizeOf(group.runs)})`, group.runs, `in ${nameOf(group)}`));
  }
  const rest = GROUPS.filter(({ colour }) => colour === "rest");
  if (rest.length) {
    const runs = union(rest.map((group) => group.runs));
    entries.push(chip("rest", `${plural(rest.length, "other place")} (${sizeOf(runs)})`, runs, "in other places"));
  }
  for (const { condition, runs } of BY_CONDITION) {
    if (condition === "alive") continue;
    const { sign, label } = CONDITIONS[condition];
    const entry = chip(`none ${condition}`, `${label} (${sizeOf(runs)})`, runs, label);
    entry.querySelector(".key").textContent = sign;
    entries.push(entry);
  }
  byId("legend").replaceChildren(...entries);
}

// The panel of one rank: its identity, its progress, and the stacks of all its threads in both
// samples.

function openRank(rank) {
  show({ rank });
  drawPanel(rank);
  const panel = byId("panel");
  panel.hidden = false;
  panel.scrollIntoView({ block: "start" });
  panel.focus({ preventScroll: true });
}

function closePanel() {
  const cell = byId(`cell-${view.rank}`);
  byId("panel").hidden = true;
  show({ rank: null });
  if (cell) {
    focusOnly(byId("strip"), cell);
    cell.focus();
  }
}

function drawPanel(rank) {
  const panel = byId("panel");
  const entry = RANKS.get(rank);
  const condition = conditionOf(rank);
  const state = RANK_STATES.get(rank);
  const neighbourButton = (step) => {
    const to = rank + step;
    return el(
      "button",
      { type: "button", class: "small", disabled: to < 0 || to >= HIGHEST, "aria-label": `Rank ${to}`, onclick: () => openRank(to) },
      step < 0 ? "← Previous" : "Next →",
    );
  };
  panel.replaceChildren(
    el(
      "div",
      { class: "panel-head" },
      el("h2", { id: "panel-title" }, `Rank ${rank}`, containsRank(CULPRITS, rank) ? el("span", { class: "tag small" }, "culprit") : null),
      el("div", { class: "buttons" }, neighbourButton(-1), neighbourButton(1), el("button", { type: "button", class: "small", id: "close-panel", onclick: closePanel }, "Close")),
    ),
  );
  const facts = [
    ["State", entry && condition === "alive" ? D.texts[entry.last.state] : [CONDITIONS[condition].label, entry ? D.texts[entry.last.state] : ""].filter(Boolean).join(": ")],
    ["Process", entry?.pid ? `${entry.pid}` : ""],
    ["Node", nodeOf(rank)],
    ["Command", entry ? D.texts[entry.command] : ""],
    ["Activity", state && state.activity !== "unknown" ? state.activity.replaceAll("_", " ") : ""],
  ];
  if (entry?.moved) {
    const { cpu_ms, io_bytes, stacks, ran } = entry.moved;
    const detail = `CPU ${timeText(cpu_ms)}, ${bytesText(io_bytes)} read and written, ${plural(stacks, "thread")} with a changed stack, ${ran} ran`;
    facts.push(["Between the samples", `${movedText(entry.moved)} (${detail})`]);
  }
  panel.append(factList(facts));
  const why = absentOf(rank)?.why;
  const known = (state?.errors ?? []).filter((error) => !why?.includes(error));
  const errors = [...(why ? [why] : []), ...known, ...(entry?.errors ?? []).map((error) => D.texts[error])];
  if (errors.length) panel.append(el("ul", { class: "errors" }, [...new Set(errors)].map((error) => el("li", {}, error))));
  if (!entry) {
    panel.append(el("p", {}, "There is no dump of this rank."));
    return;
  }
  panel.append(...process(entry.first, entry.last));
  for (const child of entry.children ?? []) {
    const [first, last] = [child.samples[child.samples.length - 2], child.samples[child.samples.length - 1]];
    const title = `Child process ${child.pid}: ${D.texts[child.command] || "unknown command"}`;
    const state = last ? D.texts[last.state] : "";
    panel.append(lazy(el("summary", {}, el("b", {}, title), el("span", { class: "muted" }, ` ${state}${child.moved ? `, ${movedText(child.moved)}` : ""}`)), () => (last ? process(first, last) : []), "child"));
  }
}

/** Details whose content is created when they are first opened. */
function lazy(summary, make, className) {
  const details = el("details", { class: className }, summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...make());
  });
  return details;
}

/** Maximum number of entries of a list of threads or tasks. */
const MOST_LISTED = 400;

/** All threads of a process, the main one first and open. */
function process(first, last) {
  const before = new Map(first ? threadsOf(first).map((thread) => [thread.tid, thread]) : []);
  const now = threadsOf(last);
  const pairs = now.map((thread) => ({ thread, earlier: before.get(thread.tid) ?? null }));
  const tids = new Set(now.map((thread) => thread.tid));
  for (const [tid, thread] of before) if (!tids.has(tid)) pairs.push({ thread: null, earlier: thread });
  const isMain = ({ thread, earlier }) => thread?.main || (!thread && earlier.main && last.main === undefined);
  const main = pairs.filter(isMain);
  const changed = pairs.filter((pair) => !isMain(pair) && first && differs(pair));
  const others = pairs.filter((pair) => !isMain(pair) && !changed.includes(pair));
  const nodes = main.map((pair) => el("div", { class: "thread main" }, el("h3", {}, threadTitle(pair)), threadBody(pair, Boolean(first), true), ...suspendedOf(pair)));
  const fold = (pair) => lazy(el("summary", {}, ...threadTitle(pair), foldedLeaf(pair)), () => [threadBody(pair, Boolean(first), false), ...suspendedOf(pair)], "thread");
  if (changed.length) nodes.push(el("h3", {}, `${capital(plural(changed.length, "other thread"))} moved`), ...changed.slice(0, MOST_LISTED).map(fold));
  if (others.length) {
    nodes.push(el("h3", {}, first ? `${capital(plural(others.length, "other thread"))} did not move` : plural(others.length, "other thread")));
    nodes.push(...others.slice(0, MOST_LISTED).map(fold));
  }
  if (Math.max(changed.length, others.length) > MOST_LISTED) nodes.push(el("p", { class: "hint" }, `Each list ends after ${MOST_LISTED} threads.`));
  return nodes;
}

const differs = ({ thread, earlier }) => !thread || !earlier || thread.native !== earlier.native || thread.python !== earlier.python;

function threadTitle({ thread, earlier }) {
  const shown = thread ?? earlier;
  const name = D.texts[shown.name] || "unnamed";
  const marks = [];
  if (shown.state) marks.push(D.texts[shown.state]);
  if (shown.wchan) marks.push(`in kernel ${D.texts[shown.wchan]}`);
  if (shown.gil) marks.push("holds the GIL");
  if (thread?.ran) marks.push("ran between the samples");
  if (!thread) marks.push("gone in the last sample");
  if (shown.suspended && !shown.main) marks.push(`${D.texts[shown.suspended[0].description]}${shown.suspended.length > 1 ? ", …" : ""}`);
  return [
    el("b", {}, shown.main ? `Main thread (${name})` : name),
    el("span", { class: "muted" }, ` ${shown.tid || ""}${marks.length ? ` · ${marks.join(" · ")}` : ""}`),
  ];
}

/** The innermost frame, beside the title of a folded thread. */
function foldedLeaf({ thread, earlier }) {
  const shown = thread ?? earlier;
  const mode = shown.python !== undefined ? "python" : "native";
  return shown[mode] === undefined ? el("span", { class: "leaf" }, "no stack") : frameText(stackOf(mode, shown[mode])[0], "frame leaf");
}

/** The tasks and greenlets of a thread that wait, and whether they did so in the first sample. */
function suspendedOf({ thread, earlier }) {
  const { suspended = [] } = thread ?? earlier;
  if (!suspended.length) return [];
  const before = thread && earlier ? new Set(earlier.suspended?.map(({ stack }) => stack)) : null;
  const nodes = suspended.slice(0, MOST_LISTED).map(({ description, stack }) => {
    // The root of the stack names what waits.
    const frames = stack === undefined ? [] : stackOf("suspended", stack).slice(0, -1);
    const own = frames.find((name) => isOwn(splitName(name)[1])) ?? frames[0];
    const isNew = before && !before.has(stack);
    return lazy(
      el("summary", {}, el("b", {}, capital(D.texts[description])), isNew ? el("span", { class: "muted" }, " · not in the first sample") : null, own && frameText(own, "frame leaf")),
      () => [el("ol", { class: "stack", start: "0" }, frames.map((name) => el("li", {}, frameText(name))))],
      "suspended",
    );
  });
  return [el("h4", {}, "Tasks and greenlets that wait"), ...nodes];
}

function threadBody({ thread, earlier }, two, open) {
  const body = el("div", { class: "samples" });
  const moved = two && differs({ thread, earlier });
  if (two && (moved || open)) {
    body.append(sampleBox("First sample", earlier, thread, false), sampleBox("Last sample", thread, earlier, moved));
    if (!moved) body.prepend(el("p", { class: "same" }, "The same stack in both samples."));
  } else {
    body.classList.add("one");
    body.append(sampleBox(two ? "The same stack in both samples" : "Stack", thread ?? earlier, null, false));
  }
  return body;
}

function sampleBox(title, thread, other, mark) {
  const box = el("div", { class: "sample" }, el("h4", {}, title));
  if (!thread) {
    box.append(el("p", { class: "muted" }, "This thread did not exist."));
    return box;
  }
  for (const [mode, heading] of [["python", "Python, innermost call first"], ["native", "Native, innermost call first"]]) {
    if (thread[mode] === undefined) continue;
    const names = stackOf(mode, thread[mode]);
    const earlier = other?.[mode] === undefined ? [] : stackOf(mode, other[mode]);
    // Both stacks share their callers, so they are compared from the root.
    const fromRoot = (list, i, length) => list[list.length - (length - i)];
    box.append(
      el("h5", {}, heading),
      el(
        "ol",
        { class: "stack", start: "0" },
        names.map((name, i) => el("li", { class: mark && fromRoot(earlier, i, names.length) !== name ? "changed" : null }, frameText(name))),
      ),
    );
  }
  if (thread.kernel) box.append(el("h5", {}, "Kernel, innermost call first"), el("pre", {}, D.texts[thread.kernel]));
  if (thread.incomplete) box.append(el("p", { class: "muted" }, `Incomplete: ${D.texts[thread.incomplete]}`));
  if (thread.capture) box.append(el("p", { class: "muted taken" }, `Captured ${D.texts[thread.capture]}.`));
  if (box.childElementCount === 1) box.append(el("p", { class: "muted" }, "No stack."));
  return box;
}
