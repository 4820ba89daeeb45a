// Helpers of all parts. Names are untrusted: text is inserted into the page as text nodes only.

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

// Sets of ranks are ascending runs, flat: [first, last, first, last, …]. As text they have the form of labels: 0-3/6.

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
