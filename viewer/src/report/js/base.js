// Code that all parts use: helpers, the unpacked data of the page, and the state of the view. Names
// are untrusted: text is inserted into the page as text nodes only.

/** Creates an element. `props` are attributes, `class`, `data-…`, or `onclick` and the like. */
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const byId = (id) => document.getElementById(id);
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// Sets of ranks are ascending runs, flat: [first, last, first, last, …]. As text they have the form
// of labels: 0-3/6.

function parseRuns(text) {
  const runs = [];
  for (const part of text === "" ? [] : text.split("/")) {
    const [first, last] = part.split("-").map(Number);
    runs.push(first, last ?? first);
  }
  return runs;
}

function runsOf(ranks) {
  const runs = [];
  for (const rank of ranks) {
    if (runs.length && runs[runs.length - 1] === rank - 1) runs[runs.length - 1] = rank;
    else runs.push(rank, rank);
  }
  return runs;
}

function sizeOf(runs) {
  let size = 0;
  for (let i = 0; i < runs.length; i += 2) size += runs[i + 1] - runs[i] + 1;
  return size;
}

/** Index of the first run that ends at or after a rank. */
function runAt(runs, rank) {
  let low = 0;
  let high = runs.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs[2 * middle + 1] < rank) low = middle + 1;
    else high = middle;
  }
  return low;
}

function containsRank(runs, rank) {
  const at = runAt(runs, rank);
  return 2 * at < runs.length && runs[2 * at] <= rank;
}

function intersect(a, b) {
  const runs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    const first = Math.max(a[i], b[j]);
    const last = Math.min(a[i + 1], b[j + 1]);
    if (first <= last) runs.push(first, last);
    if (a[i + 1] < b[j + 1]) i += 2;
    else j += 2;
  }
  return runs;
}

function complement(runs, world) {
  const rest = [];
  let next = 0;
  for (let i = 0; i < runs.length && next < world; i += 2) {
    if (runs[i] > next) rest.push(next, Math.min(runs[i], world) - 1);
    next = runs[i + 1] + 1;
  }
  if (next < world) rest.push(next, world - 1);
  return rest;
}

function union(sets) {
  const all = sets.flatMap((runs) => Array.from({ length: runs.length / 2 }, (_, i) => [runs[2 * i], runs[2 * i + 1]]));
  all.sort((a, b) => a[0] - b[0]);
  const runs = [];
  for (const [first, last] of all) {
    const end = runs.length - 1;
    if (end > 0 && first <= runs[end] + 1) runs[end] = Math.max(runs[end], last);
    else runs.push(first, last);
  }
  return runs;
}

const isSubset = (a, b) => sizeOf(intersect(a, b)) === sizeOf(a);

function runTexts(runs) {
  const texts = [];
  for (let i = 0; i < runs.length; i += 2) {
    texts.push(runs[i] === runs[i + 1] ? `${runs[i]}` : `${runs[i]}-${runs[i + 1]}`);
  }
  return texts;
}

/** A rank set in the form of labels. */
const labelOf = (runs) => runTexts(runs).join("/");

/** For prose: `ranks 0-3, 6`, cut after some runs. */
function ranksText(runs, limit = 10) {
  const texts = runTexts(runs);
  if (texts.length === 0) return "no rank";
  const rest = sizeOf(runs.slice(2 * limit));
  const tail = rest ? ` and ${rest} more` : "";
  return `${sizeOf(runs) === 1 ? "rank" : "ranks"} ${texts.slice(0, limit).join(", ")}${tail}`;
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function bytesText(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit + 1 < units.length) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

const timeText = (ms) => (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`);

/** Moves the focus among a list's children with the arrow keys; one of them is in the tab order. */
function focusOnly(container, target) {
  container.querySelectorAll('[tabindex="0"]').forEach((node) => node.setAttribute("tabindex", "-1"));
  target.setAttribute("tabindex", "0");
}

// The unpacked data of the page.

const D = JSON.parse(byId("data").textContent);
const WORLD = D.world;
const SETS = [];
const setOf = (id) => (SETS[id] ??= parseRuns(D.sets[id]));
const RANKS = new Map(D.ranks.map((rank) => [rank.rank, rank]));
const WITH_DUMP = runsOf(D.ranks.map((rank) => rank.rank));
const HIGHEST = Math.max(WORLD, WITH_DUMP.length ? WITH_DUMP[WITH_DUMP.length - 1] + 1 : 0);
/** Maximum number of ranks that are drawn individually. */
const MOST_CELLS = 20000;

const VERDICT = D.verdict;
const CULPRITS = VERDICT ? runsOf(VERDICT.culprits) : [];
/** The processes of the culprits, with their nodes and commands. */
const PROCESSES = VERDICT?.culprit_processes ?? [];

/** Conditions of a rank: the letter or sign in its cell, and its name. */
const CONDITIONS = {
  alive: { sign: "", label: "running or sleeping" },
  stopped: { sign: "‖", label: "stopped" },
  d_state: { sign: "D", label: "D state: stuck in the kernel" },
  dead: { sign: "✕", label: "dead" },
  left: { sign: "–", label: "exited" },
  no_dump: { sign: "?", label: "no dump" },
};
const BY_CONDITION = D.conditions.map(({ condition, ranks }) => ({ condition, runs: setOf(ranks) }));
const conditionOf = (rank) => BY_CONDITION.find(({ runs }) => containsRank(runs, rank))?.condition ?? "no_dump";

/** Groups with their colours: groups of culprits are red, the largest others have own colours. */
const COLOURS = 6;
const GROUPS = D.groups.map((group) => ({ ...group, runs: setOf(group.ranks) }));
{
  let next = 0;
  for (const group of GROUPS) {
    if (CULPRITS.length && isSubset(group.runs, CULPRITS)) group.colour = "culprit";
    else group.colour = next < COLOURS ? `g${next++}` : "rest";
  }
}
/** Group of every drawn rank, for fast lookup. */
const OWNERS = new Int32Array(Math.min(HIGHEST, MOST_CELLS)).fill(-1);
GROUPS.forEach(({ runs }, group) => {
  for (let i = 0; i < runs.length; i += 2) OWNERS.fill(group, runs[i], runs[i + 1] + 1);
});
const groupOf = (rank) => (rank < OWNERS.length ? GROUPS[OWNERS[rank]] : GROUPS.find(({ runs }) => containsRank(runs, rank)));

/** Ranks that have no dump or whose process has ended: the node, and how they ended. */
const ABSENT = D.absent.map(({ ranks, node, why }) => ({ runs: setOf(ranks), node: D.texts[node], why: D.texts[why] }));
const absentOf = (rank) => ABSENT.find(({ runs }) => containsRank(runs, rank));
const nodeOf = (rank) => D.texts[RANKS.get(rank)?.node ?? 0] || absentOf(rank)?.node || "";

/** The verdict's entry for each rank. */
const RANK_STATES = new Map();
for (const group of VERDICT?.ranks ?? []) for (const rank of group.ranks) RANK_STATES.set(rank, group);

/** Function and file of a frame's name, `func@file`. Both may contain an `@`. */
function splitName(name) {
  const found = name.search(/@(?=\/|<|\?\?|[^@\s]*\.py:\d+$)/);
  const at = found > 0 ? found : name.lastIndexOf("@");
  return at < 0 ? [name, ""] : [name.slice(0, at), name.slice(at + 1)];
}

/** Frames that belong to the interpreter, to torch or to other libraries. */
const LIBRARY = /site-packages\/|dist-packages\/|\/lib(64)?\/python\d|\/torch\/|^<|importlib|\.so(\.|$)|^\?\?$/;
const isOwn = (file) => /\.py:\d+$/.test(file) && !LIBRARY.test(file);

/** One of the three trees: parents and labels of its nodes, unpacked when it is first shown. */
const TREES = {};
function treeOf(mode) {
  if (TREES[mode]) return TREES[mode];
  const { depth, name, ranks, main } = D.trees[mode];
  const parent = new Int32Array(depth.length).fill(-1);
  const open = [];
  for (let i = 0; i < depth.length; i++) {
    open.length = depth[i];
    parent[i] = open.length ? open[open.length - 1] : -1;
    open.push(i);
  }
  return (TREES[mode] = { mode, depth, name, all: ranks, main, parent });
}

/** The names of the stack that ends at a node, leaf first. */
function stackOf(mode, node) {
  const tree = treeOf(mode);
  const names = [];
  for (let at = node; at >= 0; at = tree.parent[at]) names.push(D.texts[tree.name[at]]);
  return names;
}

/** The threads of a sample, with their ids. */
function threadsOf(sample) {
  let { tid } = sample;
  const tids = D.lists[sample.tids].map((difference) => (tid += difference));
  return D.lists[sample.threads].map((thread, i) => ({ ...D.threads[thread], tid: tids[i], main: i === sample.main }));
}

/** The view: ranks to which it is limited, ranks of the chosen frame, the rank with open stacks. */
const view = { filter: null, why: "", frame: null, rank: null };
const listeners = [];
function show(changes) {
  Object.assign(view, changes);
  listeners.forEach((listener) => listener(changes));
}
const onlyRanks = (runs, why) => show({ filter: runs, why });

/** The name of a group's innermost user frame, else of its deepest frame; none without a stack. */
function placeOf(group) {
  if (group.place !== undefined) return group.place;
  const sample = RANKS.get(group.runs[0])?.last;
  const thread = sample?.main === undefined ? null : D.threads[D.lists[sample.threads][sample.main]];
  const names = thread?.python === undefined ? [] : stackOf("python", thread.python);
  const deepest = group.deepest === null ? null : D.texts[group.deepest];
  return (group.place = names.find((name) => isOwn(splitName(name)[1])) ?? deepest);
}
const nameOf = (group) => (placeOf(group) === null ? "no stack" : splitName(placeOf(group))[0]);
