// The merged stacks as a flame graph with the root on top. The width of a frame is the number of
// its ranks, or of the threads below it if its ranks have several. Only visible frames are in the
// page, so depth and number of frames cost nothing.

const ROW = 20;
const NARROW = 3;

/** Positions of all frames of a tree, for the shown ranks. */
function layOut(tree, sets, filter) {
  const size = tree.depth.length;
  const counts = new Map();
  const countOf = (set) => {
    let count = counts.get(set);
    if (count === undefined) counts.set(set, (count = sizeOf(filter ? intersect(setOf(set), filter) : setOf(set))));
    return count;
  };
  const width = new Float64Array(size);
  const beneath = new Float64Array(size);
  let total = 0;
  // Parents come before their children, so in reverse order each child comes first.
  for (let i = size - 1; i >= 0; i--) {
    width[i] = Math.max(countOf(sets[i]), beneath[i]);
    if (tree.parent[i] >= 0) beneath[tree.parent[i]] += width[i];
    else total += width[i];
  }
  const left = new Float64Array(size);
  const next = new Float64Array(size);
  const rows = [];
  let root = 0;
  for (let i = 0; i < size; i++) {
    if (width[i] === 0) continue;
    const parent = tree.parent[i];
    if (parent >= 0) {
      left[i] = next[parent];
      next[parent] += width[i];
    } else {
      left[i] = root;
      root += width[i];
    }
    next[i] = left[i];
    (rows[tree.depth[i]] ??= []).push(i);
  }
  return { width, left, rows, total };
}

/** Colour of a frame by its ranks: of culprits only, of one group only, of several. */
const SET_COLOURS = new Map();
function colourOfSet(set) {
  if (!SET_COLOURS.has(set)) {
    const runs = setOf(set);
    const group = runs.length ? groupOf(runs[0]) : null;
    let colour = "shared";
    if (runs.length && CULPRITS.length && isSubset(runs, CULPRITS)) colour = "culprit";
    else if (group && group.colour !== "culprit" && isSubset(runs, group.runs)) colour = group.colour;
    SET_COLOURS.set(set, colour);
  }
  return SET_COLOURS.get(set);
}

const MODES = { python: "Python", native: "Native", mixed: "Mixed" };
if (D.trees.suspended.depth.length) MODES.suspended = "Tasks and greenlets";

function buildFlames() {
  const section = byId("flames");
  const state = { mode: "python", main: true, zoom: -1, chosen: -1, needle: "", hits: new Set(), hitNodes: [], hitAt: -1 };
  let tree;
  let places;

  const tabs = Object.entries(MODES).map(([mode, name]) =>
    el("button", { type: "button", role: "tab", id: `tab-${mode}`, "aria-controls": "flame", "data-mode": mode, onclick: () => choose(mode) }, name),
  );
  const tablist = el("div", { class: "tabs", role: "tablist", "aria-label": "Kind of stack" }, tabs);
  tablist.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const to = tabs[(tabs.findIndex((tab) => tab.dataset.mode === state.mode) + step + tabs.length) % tabs.length];
    choose(to.dataset.mode);
    to.focus();
    event.preventDefault();
  });
  const only = el("input", { type: "checkbox", id: "main-only" });
  only.checked = state.main;
  only.addEventListener("change", () => {
    state.main = only.checked;
    choose(state.mode);
  });
  const quick = CULPRITS.length
    ? el("button", { type: "button", class: "small", id: "culprits-only", onclick: () => onlyRanks(CULPRITS, "culprits") }, `Only ${ranksText(CULPRITS, 3)}`)
    : null;
  const search = el("input", { id: "search", type: "search", placeholder: "Search frames  ( / )", "aria-label": "Search frames", autocomplete: "off", spellcheck: "false" });
  const found = el("span", { id: "found", role: "status", "aria-live": "polite", class: "muted" });
  const reset = el("button", { type: "button", class: "small", id: "reset-zoom", onclick: () => zoomTo(-1) }, "Reset zoom");
  const box = el("div", { id: "flame", class: "flame", role: "tree", "aria-label": "Merged stacks, outermost call on top" });
  const sheet = el("div", { class: "sheet" });
  const detail = el("div", { id: "detail", class: "detail", role: "status", "aria-live": "polite" });
  box.append(sheet);
  section.append(
    ...heading("flames-title", "Merged stacks of all ranks", "The outermost call is on top. The width of a frame shows how many ranks are in it. Where ranks make different calls, the frame below it splits."),
    el("div", { class: "tools" }, [tablist, el("label", {}, only, " Main threads only"), quick], search, found, reset),
    box,
    detail,
  );

  function choose(mode) {
    Object.assign(state, { mode, zoom: -1, chosen: -1 });
    tree = treeOf(mode);
    for (const tab of tabs) {
      const on = tab.dataset.mode === mode;
      tab.setAttribute("aria-selected", `${on}`);
      tab.setAttribute("tabindex", on ? "0" : "-1");
    }
    box.setAttribute("aria-labelledby", `tab-${mode}`);
    box.scrollTop = 0;
    arrange();
    find();
    show({ frame: null });
    describe();
  }

  function arrange() {
    places = layOut(tree, sets(), view.filter);
    if (state.zoom >= 0 && places.width[state.zoom] === 0) state.zoom = -1;
    draw();
  }

  /** Number of the rank set of every node: of main threads, or of all. */
  const sets = () => (state.main ? tree.main : tree.all);
  const runsOfNode = (node) => setOf(sets()[node]);
  const nameOfNode = (node) => D.texts[tree.name[node]];
  const ranksLabel = (node) => `@${labelOf(runsOfNode(node))}|${labelOf(complement(runsOfNode(node), WORLD))}`;

  /** First position in a row at which a frame ends after `x`. */
  function firstBehind(row, x) {
    let low = 0;
    let high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places.left[row[middle]] + places.width[row[middle]] <= x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function draw() {
    const focused = box.contains(document.activeElement) ? state.chosen : -1;
    const rows = places.rows;
    // The scroll bar must not change the width that the frames are measured with.
    const wide = box.clientWidth;
    const zoomed = state.zoom >= 0;
    const from = zoomed ? places.left[state.zoom] : 0;
    const span = zoomed ? places.width[state.zoom] : places.total;
    const to = from + span;
    const scale = span > 0 ? wide / span : 0;
    const zoomDepth = zoomed ? tree.depth[state.zoom] : -1;
    let deepest = zoomDepth + 1;
    while (rows[deepest] && places.left[rows[deepest][firstBehind(rows[deepest], from)] ?? -1] < to) deepest++;
    sheet.style.height = `${Math.max(deepest, 1) * ROW}px`;
    const top = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
    const bottom = Math.min(deepest, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 4);
    const path = [];
    for (let at = state.zoom; at >= 0; at = tree.parent[at]) path[tree.depth[at]] = at;
    const nodes = [];
    for (let depth = top; depth < bottom; depth++) {
      if (depth <= zoomDepth) {
        nodes.push(frameAt(path[depth], 0, wide, depth < zoomDepth));
        continue;
      }
      const row = rows[depth];
      let narrow = null;
      const close = () => {
        if (narrow) nodes.push(narrowBlock(narrow, depth));
        narrow = null;
      };
      for (let i = firstBehind(row, from); i < row.length && places.left[row[i]] < to; i++) {
        const node = row[i];
        const x = (places.left[node] - from) * scale;
        const w = places.width[node] * scale;
        // The chosen frame has the focus, so it is drawn even if it is narrow.
        if (w >= NARROW || node === state.chosen) {
          close();
          nodes.push(frameAt(node, x, Math.max(w, NARROW), false));
          continue;
        }
        if (!narrow || x - narrow.end >= 1) {
          close();
          narrow = { x, end: x, count: 0, widest: node, hit: false, culprit: false };
        }
        narrow.end = x + w;
        narrow.count += 1;
        if (places.width[node] > places.width[narrow.widest]) narrow.widest = node;
        narrow.hit ||= state.hits.has(node);
        if (!narrow.culprit && colourOfSet(sets()[node]) === "culprit") [narrow.culprit, narrow.widest] = [true, node];
      }
      close();
    }
    sheet.replaceChildren(...nodes);
    if (nodes.length === 0) sheet.append(el("p", { class: "empty" }, emptyText()));
    reset.disabled = !zoomed;
    if (!sheet.querySelector('[tabindex="0"]')) sheet.querySelector(".node")?.setAttribute("tabindex", "0");
    if (focused >= 0) sheet.querySelector(`[data-node="${focused}"]`)?.focus({ preventScroll: true });
  }

  function emptyText() {
    if (tree.depth.length) return `None of these ranks has a ${state.main ? "main thread with a " : ""}stack of this kind.`;
    if (state.mode === "mixed") return "No thread has a Python stack and a native stack that match, so there are no mixed stacks.";
    return `The dumps contain no ${MODES[state.mode]} stacks.`;
  }

  function frameAt(node, x, w, above) {
    const [func, file] = splitName(nameOfNode(node));
    const label = ranksLabel(node);
    const count = sizeOf(runsOfNode(node));
    const classes = ["node", colourOfSet(sets()[node])];
    if (above) classes.push("above");
    if (state.chosen === node) classes.push("chosen");
    if (state.needle) classes.push(state.hits.has(node) ? "hit" : "miss");
    const item = el(
      "div",
      {
        class: classes.join(" "),
        role: "treeitem",
        "aria-level": tree.depth[node] + 1,
        "aria-selected": `${state.chosen === node}`,
        "aria-label": `${func}, ${file}, ${count} of ${plural(WORLD, "rank")}: ${labelOf(runsOfNode(node)).replaceAll("/", ", ")}`,
        tabindex: state.chosen === node ? "0" : "-1",
        title: `${nameOfNode(node)}${label}`,
        "data-node": node,
      },
      el("b", {}, func),
      w > 60 ? el("span", { class: "file" }, `@${file}`) : null,
      w > 60 ? el("span", { class: "label" }, label) : null,
    );
    item.style.left = `${x}px`;
    item.style.width = `${Math.max(1, w - 1)}px`;
    item.style.top = `${tree.depth[node] * ROW}px`;
    return item;
  }

  /** Frames that are too narrow to be drawn separately. Those of culprits stay visible. */
  function narrowBlock({ x, end, count, widest, hit, culprit }, depth) {
    const classes = ["many", culprit ? "culprit" : "", hit ? "hit" : ""].filter(Boolean);
    const title = `${plural(count, "narrow frame")}${culprit ? ", a culprit's among them" : ""}: click to zoom`;
    const item = el("div", { class: classes.join(" "), title, "data-widest": widest });
    item.style.left = `${x}px`;
    item.style.width = `${Math.max(culprit ? 5 : 1, end - x - 1)}px`;
    item.style.top = `${depth * ROW}px`;
    return item;
  }

  function zoomTo(node) {
    state.zoom = node;
    draw();
    const depth = node >= 0 ? tree.depth[node] : 0;
    if (node >= 0 && (depth * ROW < box.scrollTop || (depth + 3) * ROW > box.scrollTop + box.clientHeight)) {
      box.scrollTop = Math.max(0, (depth - 2) * ROW);
      draw();
    }
  }

  /** Chooses a frame, shows its ranks in the strip, and scrolls to it. */
  function pick(node, focus) {
    state.chosen = node;
    const y = tree.depth[node] * ROW;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y + ROW > box.scrollTop + box.clientHeight) box.scrollTop = y + ROW - box.clientHeight;
    draw();
    if (focus) sheet.querySelector(`[data-node="${node}"]`)?.focus({ preventScroll: true });
    show({ frame: { runs: runsOfNode(node) } });
    describe();
  }

  /** Details of the chosen frame, below the graph. */
  function describe() {
    const node = state.chosen;
    if (node < 0) {
      detail.replaceChildren(
        el("p", { class: "hint" }, "Click a frame to zoom and to highlight its ranks above. Keys: arrows move, Enter zooms, Esc zooms out, / searches."),
      );
      return;
    }
    const runs = runsOfNode(node);
    const rest = complement(runs, WORLD);
    const name = nameOfNode(node);
    const button = (set, text, why) =>
      el("button", { type: "button", class: "small", disabled: set.length === 0, onclick: () => onlyRanks(set, why) }, text);
    const [func] = splitName(name);
    detail.replaceChildren(
      el("p", {}, frameText(name), el("code", { class: "label" }, ranksLabel(node))),
      el(
        "p",
        { class: "buttons" },
        el("span", {}, `${plural(sizeOf(runs), "rank")} in this stack, ${sizeOf(rest)} not in it.`),
        button(runs, "Show only ranks in this stack", `in ${func}`),
        button(rest, "Show only ranks not in it", `not in ${func}`),
      ),
    );
  }

  function find() {
    const needle = search.value.trim().toLowerCase();
    Object.assign(state, { needle, hits: new Set(), hitNodes: [], hitAt: -1 });
    if (needle) {
      const matches = new Map();
      for (let node = 0; node < tree.name.length; node++) {
        const name = tree.name[node];
        if (!matches.has(name)) matches.set(name, D.texts[name].toLowerCase().includes(needle));
        if (matches.get(name) && runsOfNode(node).length) state.hitNodes.push(node);
      }
      state.hits = new Set(state.hitNodes);
      const runs = union([...new Set(state.hitNodes.map((node) => sets()[node]))].map(setOf));
      found.replaceChildren(`${plural(state.hitNodes.length, "frame")} on ${plural(sizeOf(runs), "rank")}`);
      if (runs.length) {
        const why = `in a frame that matches "${search.value.trim()}"`;
        found.append(" ", el("button", { type: "button", class: "small", onclick: () => onlyRanks(runs, why) }, "Show only these ranks"));
      }
    } else {
      found.replaceChildren();
    }
    draw();
  }

  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (search.value) {
        search.value = "";
        find();
      } else search.blur();
      event.preventDefault();
    } else if (event.key === "Enter" && state.hitNodes.length) {
      const count = state.hitNodes.length;
      state.hitAt = (state.hitAt + (event.shiftKey ? count - 1 : 1)) % count;
      const node = state.hitNodes[state.hitAt];
      if (!isInZoom(node)) state.zoom = -1;
      // Zooms to a frame that is too narrow to be visible.
      if ((places.width[node] / (state.zoom >= 0 ? places.width[state.zoom] : places.total)) * box.clientWidth < 40) state.zoom = node;
      pick(node, false);
      event.preventDefault();
    }
  });

  const isInZoom = (node) =>
    state.zoom < 0 || (places.left[node] >= places.left[state.zoom] && places.left[node] + places.width[node] <= places.left[state.zoom] + places.width[state.zoom]);

  box.addEventListener("click", (event) => {
    const item = event.target.closest(".node, .many");
    if (!item) return;
    if (item.classList.contains("many")) {
      zoomTo(Number(item.dataset.widest));
      pick(Number(item.dataset.widest), true);
      return;
    }
    const node = Number(item.dataset.node);
    zoomTo(node);
    pick(node, true);
  });
  box.addEventListener("keydown", (event) => {
    const node = Number(document.activeElement?.dataset?.node ?? -1);
    if (node < 0) return;
    const beside = (step) => {
      const row = places.rows[tree.depth[node]];
      const to = row[row.indexOf(node) + step];
      return to !== undefined && isInZoom(to) && tree.depth[node] > (state.zoom >= 0 ? tree.depth[state.zoom] : -1) ? to : undefined;
    };
    const keys = {
      ArrowUp: () => (tree.parent[node] >= 0 ? tree.parent[node] : undefined),
      // The only visible child of an ancestor of the zoomed frame is the next frame on the path.
      ArrowDown: () => (places.rows[tree.depth[node] + 1] ?? []).find((child) => tree.parent[child] === node && (isInZoom(child) || isAbove(child))),
      ArrowLeft: () => beside(-1),
      ArrowRight: () => beside(1),
      Home: () => places.rows[0][0],
    };
    if (event.key === "Enter" || event.key === " ") {
      zoomTo(node);
      pick(node, true);
    } else if (event.key === "Escape") {
      if (state.zoom >= 0) {
        zoomTo(tree.parent[state.zoom]);
        pick(node, true);
      } else {
        state.chosen = -1;
        show({ frame: null });
        describe();
        draw();
      }
    } else if (event.key in keys) {
      const to = keys[event.key]();
      if (to !== undefined) pick(to, true);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const isAbove = (node) => {
    for (let at = state.zoom; at >= 0; at = tree.parent[at]) if (at === node) return true;
    return false;
  };
  let pending = false;
  const soon = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      draw();
    });
  };
  box.addEventListener("scroll", soon, { passive: true });
  new ResizeObserver(soon).observe(box);
  listeners.push((changes) => {
    if ("filter" in changes) arrange();
  });

  const filled = Object.keys(MODES).find((mode) => D.trees[mode].depth.length);
  choose(filled ?? "python");
}
