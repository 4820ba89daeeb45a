// The verdict and the tables: the state of the ranks, of the communicators, and what changed.

/** Descriptions of the causes. */
const CAUSES = {
  process_dead: "A process is dead",
  process_stopped: "A process is stopped",
  d_state: "Stuck in the kernel (D state)",
  gil_deadlock: "Deadlock on the GIL",
  data_loader: "Waiting for the data loader",
  storage_io: "Stuck in storage I/O",
  compile: "Compiling: not a hang",
  python_gc: "Collecting garbage: not a hang",
  teardown: "Shutting down while others continue",
  host_lock: "Stuck on a lock",
  comm_init: "A communicator is not complete",
  p2p_unmatched: "A send or receive without its counterpart",
  missing_rank: "A rank did not do what the others wait for",
  kernel_hang: "A kernel does not complete",
  op_mismatch: "Ranks run different operations",
  size_mismatch: "Ranks pass different sizes",
  dtype_mismatch: "Ranks pass different types",
  p2p_cycle: "Ranks wait for each other in a cycle",
  order_mismatch: "Ranks use communicators in different orders",
  network_stall: "The network makes no progress",
  long_step: "A long step: not a hang",
  not_a_hang: "Not a hang",
  unknown: "Cause unknown",
};

const heading = (id, text, note) => [el("h2", { id }, text), note ? el("p", { class: "hint" }, note) : null];

/** A path with an emphasized file name: `schedules.py:149` in `/data/megatron/core/`. */
function pathText(path) {
  const at = path.lastIndexOf("/") + 1;
  return el("span", { class: "file" }, el("span", { class: "dir" }, path.slice(0, at)), el("span", { class: "name" }, path.slice(at)));
}

/** The name of a frame: function, then its file. */
function frameText(name, className = "frame") {
  const [func, file] = splitName(name);
  return el("span", { class: `${className}${isOwn(file) ? " own" : ""}`, title: name }, el("b", {}, func || "??"), file && pathText(file));
}

/** Ranks as a button that opens the only one, or limits the view to all of them. */
function rankButton(runs, why) {
  const one = sizeOf(runs) === 1;
  return el(
    "button",
    {
      type: "button",
      class: "ranks",
      title: one ? `Show the stacks of rank ${runs[0]}` : `Show only ${ranksText(runs)}`,
      onclick: () => (one ? openRank(runs[0]) : onlyRanks(runs, why)),
    },
    capital(ranksText(runs, 8)),
  );
}

/** A table whose cells have the titles of their columns, so that a phone can show it as a list. */
function table(columns, rows) {
  const cell = (content, i) => el("td", { "data-title": columns[i] }, content);
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, columns.map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, rows.map(({ cells, className }) => el("tr", { class: className }, cells.map(cell)))),
  );
}

/** A table that initially shows only its first rows. */
function longTable(columns, rows, limit, rowName) {
  if (rows.length <= limit) return table(columns, rows);
  const box = el("div", {});
  const all = () => box.replaceChildren(table(columns, rows));
  box.append(
    table(columns, rows.slice(0, limit)),
    el("button", { type: "button", class: "small", onclick: all }, `Show all ${plural(rows.length, rowName)}`),
  );
  return box;
}

/** How often verdicts of this kind are right, in the words of `verdict.txt`. */
function reliability() {
  const named = VERDICT.culprits.length || VERDICT.culprit_processes?.length;
  if (typeof VERDICT.probability !== "number" || !named) return null;
  const right = Math.min(99, Math.floor(VERDICT.probability * 100));
  return el("span", { class: "confidence" }, `right in about ${right} of 100 cases`);
}

function buildVerdict() {
  const box = byId("verdict");
  if (!VERDICT) {
    const places = GROUPS.filter((group) => group.deepest !== null).length;
    box.classList.add("without");
    box.append(
      el("p", { class: "cause" }, "No verdict in this folder"),
      el(
        "h1",
        {},
        `${sizeOf(WITH_DUMP).toLocaleString("en")} of ${plural(WORLD, "rank")} ${sizeOf(WITH_DUMP) === 1 ? "has" : "have"} a dump; the main threads are at ${plural(places, "place")}.`,
      ),
    );
    box.append(el("p", {}, "The stacks alone do not show which rank is the culprit. Look first at the ranks whose stacks differ from those of most ranks."));
    // Groups as small as the smallest, if they are few and others are larger.
    const least = Math.min(...GROUPS.map(({ runs }) => sizeOf(runs)));
    const small = GROUPS.filter((group) => placeOf(group) !== null && sizeOf(group.runs) === least);
    if (small.length <= 6 && small.length < GROUPS.length) {
      const line = (group) => el("li", {}, rankButton(group.runs, "a small group"), " in ", frameText(placeOf(group)));
      box.append(el("ul", {}, small.map(line)));
    }
    return;
  }
  const hasCulprits = CULPRITS.length > 0 || PROCESSES.length > 0;
  box.classList.toggle("has-culprits", hasCulprits);
  box.append(
    el(
      "p",
      { class: "cause" },
      el("span", { class: "tag" }, CAUSES[VERDICT.cause] ?? VERDICT.cause),
      el("span", { class: `confidence ${VERDICT.confidence}` }, `${VERDICT.confidence} confidence`),
      reliability(),
      VERDICT.status && VERDICT.status !== "open" ? el("span", { class: "confidence" }, VERDICT.status) : null,
    ),
    el("h1", {}, VERDICT.sentence),
  );
  if (VERDICT.promoted) box.append(el("p", {}, `This capture shows no hang. It is kept because ${VERDICT.promoted}.`));
  const shown = VERDICT.culprits.slice(0, 4);
  // Processes that belong to no rank, such as an engine for which ranks wait.
  const others = PROCESSES.filter((process) => typeof process.rank !== "number").slice(0, 4);
  if (shown.length || others.length) {
    box.append(el("div", { class: "culprits" }, [...shown.map(culpritCard), ...others.map(processCard)]));
  }
  const more = VERDICT.culprits.slice(shown.length);
  if (more.length) box.append(el("p", {}, "More culprits: ", rankButton(runsOf(more), "culprits")));
  const evidence = VERDICT.evidence.map((line) => {
    const runs = runsOf(line.ranks);
    // A line that contains its ranks needs no button with the same ranks.
    const button = runs.length && !/\branks? \d/i.test(line.text) ? rankButton(runs, "evidence") : null;
    return el("li", {}, button, button ? " " : null, line.text);
  });
  if (evidence.length) box.append(el("h2", {}, "Evidence"), el("ul", { class: "evidence" }, evidence));
  // Verdicts of earlier releases have none.
  const defects = (VERDICT.known_defects ?? []).map(({ text, url, ranks }) =>
    el("li", {}, rankButton(runsOf(ranks), "a known defect"), ` ${text} ${url}`),
  );
  if (defects.length) box.append(el("h2", {}, "Known defects"), el("ul", { class: "evidence" }, defects));
  if (VERDICT.ruled_out.length) {
    box.append(
      el(
        "details",
        { id: "ruled-out" },
        el("summary", {}, `Ruled out (${VERDICT.ruled_out.length})`),
        el(
          "ul",
          {},
          VERDICT.ruled_out.map(({ cause, reason }) => el("li", {}, el("b", {}, CAUSES[cause] ?? cause), `: ${reason}`)),
        ),
      ),
    );
  }
  const trigger = VERDICT.trigger;
  const facts = [
    ["Processes of the culprits", PROCESSES.length ? processList() : ""],
    ["Victims", VERDICT.victims.length ? ranksText(runsOf(VERDICT.victims)) : "no rank"],
    ["Job", [VERDICT.job, plural(VERDICT.world_size, "rank"), VERDICT.attempt ? `restart ${VERDICT.attempt}` : ""].filter(Boolean).join(", ")],
    ["Incident", VERDICT.incident],
    ["Earlier captures", VERDICT.earlier?.length ? VERDICT.earlier.map(captureLink) : ""],
    ["Same culprit", VERDICT.same_culprit?.length ? VERDICT.same_culprit.join(", ") : ""],
    ["Opened", VERDICT.opened_at ?? ""],
    ["Trigger", trigger ? [trigger.kind, typeof trigger.rank === "number" ? `rank ${trigger.rank}` : ""].filter(Boolean).join(", ") : ""],
    ["Verdict", typeof VERDICT.seconds_from_timeout === "number" ? `${VERDICT.seconds_from_timeout.toFixed(1)} s after the timeout` : ""],
  ];
  box.append(factList(facts));
}

const processText = ({ pid, node, command }) => [`pid ${pid}`, node, command].filter(Boolean).join(" · ");

/** The processes of the culprits: the first ones, and the number of the others. */
function processList() {
  const shown = PROCESSES.slice(0, 16);
  const line = (process) =>
    el("div", { class: "process" }, typeof process.rank === "number" ? `rank ${process.rank}: ` : "no rank: ", processText(process));
  const more = PROCESSES.length - shown.length;
  return [...shown.map(line), more > 0 ? el("div", {}, `and ${plural(more, "more process", "more processes")}`) : null].filter(Boolean);
}

/** A link to the report of another incident, in the folder beside this one. */
const captureLink = (name) => el("div", {}, el("a", { href: `../incident-${encodeURIComponent(name)}/report.html` }, name));

function processCard(process) {
  return el(
    "div",
    { class: "culprit-card" },
    el("p", { class: "who" }, el("b", {}, `Process ${process.pid}`), el("span", { class: "muted" }, [process.node, "no rank"].filter(Boolean).join(" · "))),
    process.command ? el("p", { class: "where" }, process.command) : null,
  );
}

const factList = (facts) =>
  el(
    "dl",
    { class: "facts" },
    facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );

function culpritCard(rank) {
  const entry = RANKS.get(rank);
  const state = RANK_STATES.get(rank);
  const condition = conditionOf(rank);
  const where = state?.location ?? {};
  const about = [
    nodeOf(rank),
    entry?.pid ? `pid ${entry.pid}` : "",
    condition === "alive" && entry ? D.texts[entry.last.state] : CONDITIONS[condition].label,
  ];
  return el(
    "div",
    { class: "culprit-card" },
    el("p", { class: "who" }, el("b", {}, `Rank ${rank}`), el("span", { class: "muted" }, about.filter(Boolean).join(" · "))),
    where.python
      ? el("p", { class: "where" }, el("b", {}, where.python_function ?? ""), pathText(where.python))
      : null,
    where.native ? el("p", { class: "where" }, el("span", { class: "muted" }, "in C function "), el("b", {}, where.native)) : null,
    absentOf(rank)?.why
      ? el("p", { class: "muted" }, absentOf(rank).why)
      : (state?.errors ?? []).map((error) => el("p", { class: "muted" }, error)),
    entry ? el("button", { type: "button", class: "small", onclick: () => openRank(rank) }, `Stacks of rank ${rank}`) : null,
  );
}

function buildGroups() {
  const section = byId("groups");
  const order = CULPRITS.length ? "the culprits first, then the largest group" : "the largest group first";
  section.append(...heading("groups-title", "State of the ranks", `Ranks whose main threads have the same stack form a group: ${order}.`).filter(Boolean));
  const rows = GROUPS.map((group) => ({
    className: group.colour === "culprit" ? "hot" : "",
    cells: [
      [el("i", { class: `key ${group.colour}`, "aria-hidden": "true" }), rankButton(group.runs, "one group")],
      `${sizeOf(group.runs)}`,
      placeOf(group) === null ? "no stack of the main thread" : frameText(placeOf(group)),
      group.deepest === null || placeOf(group) === D.texts[group.deepest] ? el("span", { class: "muted" }, "same frame") : frameText(D.texts[group.deepest]),
      group.own === null ? el("span", { class: "muted" }, "none") : frameText(D.texts[group.own]),
    ],
  }));
  // Culprits are the most important, so their group is never among the folded rows.
  rows.sort((a, b) => Number(b.className === "hot") - Number(a.className === "hot"));
  section.append(longTable(["Ranks", "Count", "Innermost user frame", "Innermost frame", "First frame of this group only"], rows, 12, "group"));
  const gone = BY_CONDITION.filter(({ condition }) => ["dead", "left", "no_dump"].includes(condition));
  if (!gone.length) return;
  // Ranks with the same condition and reason are one row; the last row is for ranks without a
  // reason.
  const absent = gone.flatMap(({ condition, runs }) => {
    const explained = ABSENT.map((absent) => ({ ...absent, condition, runs: intersect(absent.runs, runs) })).filter(({ runs }) => runs.length);
    const covered = union(explained.map((absent) => absent.runs));
    const rest = intersect(runs, complement(covered, HIGHEST));
    return rest.length ? [...explained, { condition, runs: rest, node: "", why: "" }] : explained;
  });
  const lines = absent.map(({ condition, runs, node, why }) => ({
    className: CULPRITS.length && isSubset(runs, CULPRITS) ? "hot" : "",
    cells: [
      [el("i", { class: `key none ${condition}`, "aria-hidden": "true" }, CONDITIONS[condition].sign), rankButton(runs, CONDITIONS[condition].label)],
      `${sizeOf(runs)}`,
      capital(CONDITIONS[condition].label),
      node || el("span", { class: "muted" }, "unknown"),
      why || el("span", { class: "muted" }, "unknown"),
    ],
  }));
  section.append(
    el("h3", { id: "absent-title" }, "Ranks that ended or have no dump"),
    longTable(["Ranks", "Count", "State", "Node", "Reason"], lines, 12, "row"),
  );
}

function buildCommunicators() {
  const section = byId("communicators");
  const head = heading(
    "communicators-title",
    "State of the communicators",
    "The counts are collectives of one communicator. A rank with a lower count than its peers is behind, and they wait for it.",
  );
  section.append(...head);
  if (!D.communicators.length) {
    section.hidden = true;
    D.notes.push("This folder has no flight records, so only the stacks show which operation a rank is in.");
    return;
  }
  const boxes = D.communicators.map((communicator) => {
    const { id, size, groups, silent, unnamed } = communicator;
    const furthest = Math.max(0, ...groups.map((group) => group.launched));
    const rows = groups.map((group) => {
      const runs = runsOf(group.ranks);
      const behind = group.launched < furthest;
      const waits = group.waits_in;
      const shape = waits?.dtype ? ` of ${waits.count.toLocaleString("en")} × ${waits.dtype}` : "";
      const peer = typeof waits?.peer === "number" ? `, peer ${waits.peer}` : "";
      return {
        className: behind || (CULPRITS.length && isSubset(runs, CULPRITS)) ? "hot" : "",
        cells: [
          rankButton(runs, `on communicator ${id}`),
          waits ? `${waits.op}${waits.seq ? ` ${waits.seq}` : ""}${shape}${peer}` : "nothing pending",
          waits ? (waits.started ? "started, not completed" : "launched, not started") : behind ? "has not launched the next collective" : "all completed",
          [`${group.launched} / ${group.started} / ${group.completed}`, behind ? el("span", { class: "tag small" }, `${furthest - group.launched} behind`) : null],
        ],
      };
    });
    if (silent.length) rows.push({ cells: [rankButton(runsOf(silent), "without a flight record"), "no flight record", "", ""] });
    if (unnamed) rows.push({ cells: [plural(unnamed, "member"), "not seen", "", ""] });
    return el(
      "div",
      { class: "communicator" },
      el("h3", {}, `Communicator ${id}`, el("span", { class: "muted" }, ` ${plural(size, "rank")}`)),
      longTable(["Ranks", "Operation", "State", "Launched / started / completed"], rows, 10, "row"),
    );
  });
  const limit = 8;
  section.append(...boxes.slice(0, limit));
  if (boxes.length > limit) {
    const rest = el("details", {}, el("summary", {}, `${plural(boxes.length - limit, "more communicator")}`));
    rest.addEventListener("toggle", () => rest.childElementCount === 1 && rest.append(...boxes.slice(limit)));
    section.append(rest);
  }
}

/** CPU share from which a process counts as busy; less is the noise of watcher threads. */
const BUSY_SHARE = 0.2;
const MOVING_BYTES_PER_SECOND = 16384;

function movedText(moved) {
  const seconds = (D.between_ms || 1000) / 1000;
  const parts = [];
  if (moved.main) parts.push("main thread's stack changed");
  if (moved.cpu_ms / 1000 >= BUSY_SHARE * seconds) parts.push("CPU busy");
  if (moved.io_bytes >= MOVING_BYTES_PER_SECOND * seconds) parts.push("bytes read or written");
  if (!parts.length && moved.stacks) parts.push("only other threads' stacks changed");
  return parts.length ? parts.join(", ") : "nothing changed";
}

function buildMoved() {
  const section = byId("moved");
  const ranks = D.ranks.filter((rank) => rank.moved);
  const apart = D.between_ms ? `The two samples are ${timeText(D.between_ms)} apart. ` : "";
  section.append(...heading("moved-title", "Changes between the two samples", `${apart}A rank without a change waits or is stuck. A rank with a change makes progress, perhaps slowly.`));
  if (!ranks.length) {
    section.hidden = true;
    D.notes.push("Each dump has only one sample, so this report cannot show what changed between two samples.");
    return;
  }
  const classes = new Map();
  for (const rank of ranks) {
    const text = movedText(rank.moved);
    let step = "";
    if (rank.moved.main) {
      const [from, to] = [rank.first, rank.last].map(mainLeaf);
      if (from && to) step = `${from} → ${to}`;
    }
    const key = `${text}\n${step}`;
    if (!classes.has(key)) classes.set(key, { text, step, ranks: [] });
    classes.get(key).ranks.push(rank);
  }
  const range = (of, format) => {
    const [low, high] = [Math.min(...of), Math.max(...of)].map(format);
    return low === high ? low : `${low} to ${high}`;
  };
  const rows = [...classes.values()]
    .sort((a, b) => b.ranks.length - a.ranks.length)
    .map(({ text, step, ranks: members }) => ({
      cells: [
        rankButton(runsOf(members.map((rank) => rank.rank)), text),
        [capital(text), step && el("div", { class: "file" }, step)],
        range(members.map((rank) => rank.moved.cpu_ms), timeText),
        range(members.map((rank) => rank.moved.io_bytes), bytesText),
        range(members.map((rank) => rank.moved.stacks), String),
        range(members.map((rank) => rank.moved.ran), String),
      ],
    }));
  section.append(longTable(["Ranks", "Change", "CPU time", "Bytes read and written", "Threads whose stack changed", "Threads that ran"], rows, 12, "row"));
}

/** The innermost frame of the main thread, Python before native. */
function mainLeaf(sample) {
  if (sample.main === undefined) return "";
  const thread = D.threads[D.lists[sample.threads][sample.main]];
  const mode = thread.python !== undefined ? "python" : "native";
  return thread[mode] === undefined ? "" : stackOf(mode, thread[mode])[0];
}

function buildNotes() {
  if (!D.notes.length) return;
  const section = byId("notes");
  section.hidden = false;
  section.append(...heading("notes-title", "Notes on this folder").filter(Boolean), el("ul", {}, D.notes.map((note) => el("li", {}, note))));
}
