// The strip of all ranks: one cell each, in the colour of its group, with the sign of its condition.

function cellTitle(rank) {
  const entry = RANKS.get(rank);
  const condition = conditionOf(rank);
  const parts = [`rank ${rank}`];
  if (containsRank(CULPRITS, rank)) parts.push("culprit");
  if (condition === "alive" && entry) parts.push(D.texts[entry.last.state]);
  else parts.push(CONDITIONS[condition].word);
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
    const { sign, word } = CONDITIONS[condition];
    const entry = chip(`none ${condition}`, `${word} (${sizeOf(runs)})`, runs, word);
    entry.querySelector(".key").textContent = sign;
    entries.push(entry);
  }
  byId("legend").replaceChildren(...entries);
}
