// Connects the parts when the page is loaded.

function buildTheme() {
  const button = byId("theme");
  const names = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  // A page that was opened from disk may have no storage.
  const stored = () => {
    try {
      return localStorage.getItem("xpu_timer.theme");
    } catch {
      return null;
    }
  };
  let theme = stored() in names ? stored() : "auto";
  const apply = () => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
    button.textContent = names[theme];
  };
  button.addEventListener("click", () => {
    theme = { auto: "dark", dark: "light", light: "auto" }[theme];
    try {
      localStorage.setItem("xpu_timer.theme", theme);
    } catch {
      // Without storage, the choice lasts as long as the page.
    }
    apply();
  });
  apply();
}

buildTheme();
{
  const about = [VERDICT?.job, D.folder, D.captured_ms ? `${new Date(D.captured_ms).toISOString().slice(0, 19).replace("T", " ")} UTC` : ""];
  byId("where").textContent = about.filter(Boolean).join(" · ");
  document.title = `${VERDICT ? VERDICT.sentence : `${plural(WORLD, "rank")}, no verdict`} - xpu_timer`;
}
buildVerdict();
buildLegend();
buildStrip();
buildLanes();
buildGroups();
buildCommunicators();
buildMoved();
buildFlames();
buildNotes();

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape" && !typing && event.target.closest?.("#panel")) {
    closePanel();
  }
});

// `report.html#rank-6` opens the stacks of a rank.
const openFromAddress = () => {
  const match = /^#rank-(\d+)$/.exec(location.hash);
  if (match && Number(match[1]) < HIGHEST) openRank(Number(match[1]));
};
addEventListener("hashchange", openFromAddress);
openFromAddress();
