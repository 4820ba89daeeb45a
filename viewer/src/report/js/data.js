// The unpacked data of the page, and the state of the view.

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
  alive: { sign: "", word: "running or sleeping" },
  stopped: { sign: "‖", word: "stopped" },
  d_state: { sign: "D", word: "D state: stuck in the kernel" },
  dead: { sign: "✕", word: "dead" },
  left: { sign: "–", word: "exited" },
  no_dump: { sign: "?", word: "no dump" },
};
const BY_CONDITION = D.conditions.map(({ condition, ranks }) => ({ condition, runs: setOf(ranks) }));
const conditionOf = (rank) => BY_CONDITION.find(({ runs }) => containsRank(runs, rank))?.condition ?? "no_dump";

/** Groups with their colours: groups of culprits are red, the largest others have their own colours. */
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

/** Function and file of a frame's word, `func@file`. Both may contain an `@`. */
function splitWord(word) {
  const found = word.search(/@(?=\/|<|\?\?|[^@\s]*\.py:\d+$)/);
  const at = found > 0 ? found : word.lastIndexOf("@");
  return at < 0 ? [word, ""] : [word.slice(0, at), word.slice(at + 1)];
}

/** Frames that belong to the interpreter, to torch or to other libraries. */
const LIBRARY = /site-packages\/|dist-packages\/|\/lib(64)?\/python\d|\/torch\/|^<|importlib|\.so(\.|$)|^\?\?$/;
const isOwn = (file) => /\.py:\d+$/.test(file) && !LIBRARY.test(file);

/** One of the three trees: parents and labels of its nodes. It is unpacked when it is first shown. */
const TREES = {};
function treeOf(mode) {
  if (TREES[mode]) return TREES[mode];
  const { depth, word, ranks, main } = D.trees[mode];
  const parent = new Int32Array(depth.length).fill(-1);
  const open = [];
  for (let i = 0; i < depth.length; i++) {
    open.length = depth[i];
    parent[i] = open.length ? open[open.length - 1] : -1;
    open.push(i);
  }
  return (TREES[mode] = { mode, depth, word, all: ranks, main, parent });
}

/** The words of the stack that ends at a node, leaf first. */
function stackOf(mode, node) {
  const tree = treeOf(mode);
  const words = [];
  for (let at = node; at >= 0; at = tree.parent[at]) words.push(D.texts[tree.word[at]]);
  return words;
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

/** The word of a group's innermost user frame, else of its deepest frame; none without a stack. */
function placeOf(group) {
  if (group.place !== undefined) return group.place;
  const sample = RANKS.get(group.runs[0])?.last;
  const thread = sample?.main === undefined ? null : D.threads[D.lists[sample.threads][sample.main]];
  const words = thread?.python === undefined ? [] : stackOf("python", thread.python);
  const deepest = group.deepest === null ? null : D.texts[group.deepest];
  return (group.place = words.find((word) => isOwn(splitWord(word)[1])) ?? deepest);
}
const nameOf = (group) => (placeOf(group) === null ? "no stack" : splitWord(placeOf(group))[0]);
