//! `report.html` in a real browser: it opens from disk, says what is wrong, zooms, searches, and
//! obeys the keyboard. The pictures that the tests take are for people: `target/pictures/*.png`.

mod browser;
mod folders;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use browser::{Browser, DOWN, ENTER, ESCAPE, RIGHT, browser};
use serde_json::{Value, json};
use xpu_timer_tests::{Hang, PATIENCE, Process, Timelines, artifacts, rank6_dumps, wait_until, write_files};

/// Runs the viewer on a folder; the report, and how long the viewer took.
fn report_of(folder: &Path) -> (PathBuf, Duration) {
    let start = Instant::now();
    let viewer = artifacts().bin("xpu_timer_stacktrace_viewer");
    let output = Process::spawn(Command::new(viewer).arg("--path").arg(folder)).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}", output.stderr);
    (folder.join("report.html"), start.elapsed())
}

/// The summary that the viewer prints.
fn summary_of(folder: &Path) -> String {
    let viewer = artifacts().bin("xpu_timer_stacktrace_viewer");
    Process::spawn(Command::new(viewer).args(["--text", "--path"]).arg(folder)).wait(PATIENCE).stdout
}

fn verdict_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("verdict.json")).expect("a verdict")).expect("JSON")
}

/// A minute of four ranks on one node. Rank 2 hangs.
const HANG: Timelines = Timelines {
    ranks: 4,
    ranks_per_node: 4,
    operations: 6000,
    period_ns: 10_000_000,
    slow_rank: None,
    clock_step: (0, 0.0),
    realtime_step_ns: 0,
    lossy_rank: None,
    hang: Some(Hang { behind: 2, lasts_ns: 310_000_000_000 }),
};

fn rank6() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_files(folder.path(), &rank6_dumps().expect("the fixture is there")).expect("it can be written");
    folder
}

/// Takes pictures of the page at a desk, in light and dark, and on a phone. Checks that the page is
/// never wider than its window.
fn take_pictures(browser: &Browser, name: &str) {
    for (look, scheme, width, phone) in
        [("light", "light", 1280, false), ("dark", "dark", 1280, false), ("phone", "light", 360, true)]
    {
        browser.scheme(scheme);
        browser.size(width, 900, phone);
        assert!(browser.fits(), "{name}, {look}: the page is wider than {width}");
        browser.picture(&format!("{name}-{look}"));
    }
    browser.scheme("light");
    browser.size(1280, 900, false);
}

/// Checks that the page has logged no error.
fn check_no_complaints(browser: &Browser) {
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_real_hang_of_the_original_tool_can_be_explored() {
    let Some(browser) = browser() else { return };
    let folder = rank6();
    browser.open(&report_of(folder.path()).0);
    assert_eq!(browser.text("h1"), "8 of 8 ranks have a dump; the main threads are at 5 places.");
    assert_eq!(browser.count("#strip .cell"), 8);
    assert_eq!(browser.count("#groups tbody tr"), 5);

    // A click on a frame makes it as wide as the graph, and lights up its ranks.
    let barrier = "#flame .node[title^='barrier@']";
    let width = format!(
        "return document.querySelector(\"{barrier}\").offsetWidth / document.querySelector('.sheet').offsetWidth"
    );
    assert!(browser.js(&width).as_f64().expect("a number") < 0.5);
    browser.click(barrier);
    assert!(browser.js(&width).as_f64().expect("a number") > 0.97);
    assert_eq!(browser.count("#strip .cell.in"), 1);
    assert_eq!(browser.count("#strip .cell.out"), 7);
    assert!(browser.text("#detail").contains("@6|0-5/7"), "{}", browser.text("#detail"));
    browser.click("#reset-zoom");
    assert!(browser.js(&width).as_f64().expect("a number") < 0.5);

    // The search counts frames and ranks, and marks what it found.
    browser.click("#search");
    browser.keys("SCHEDULES.py");
    // As the golden folded text has them.
    let found = browser.text("#found");
    assert!(found.starts_with("10 frames on 8 ranks"), "{found}");
    assert_eq!(browser.count("#flame .node.hit"), 10);
    browser.keys(ESCAPE);
    assert_eq!(browser.count("#flame .node.hit, #flame .node.miss"), 0);

    // All threads of the native stacks.
    browser.click("#tab-native");
    browser.click("#main-only");
    assert!(browser.count("#flame .node") > 30);
    check_no_complaints(&browser);
    browser.js("document.querySelector('#flame').scrollIntoView()");
    take_pictures(&browser, "rank6");
}

#[test]
fn processes_of_culprits_and_earlier_captures_are_shown() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    let path = folder.path().join("verdict.json");
    let mut verdict: Value = serde_json::from_slice(&fs::read(&path).expect("a verdict")).expect("JSON");
    verdict["culprit_processes"] = json!([
        { "rank": 2, "pid": 77, "node": "gpu-node-000", "command": "python3 loader.py" },
        { "rank": null, "pid": 8176, "node": "gpu-node-001", "command": "python3 engine.py" },
    ]);
    verdict["earlier"] = json!(["20261121T101500Z-00000001"]);
    fs::write(&path, verdict.to_string()).expect("own folder");
    browser.open(&report_of(folder.path()).0);
    assert_eq!(browser.count(".culprit-card"), 2);
    let facts = browser.text("#verdict .facts");
    for text in
        ["rank 2: pid 77 · gpu-node-000 · python3 loader.py", "no rank: pid 8176 · gpu-node-001 · python3 engine.py"]
    {
        assert!(facts.contains(text), "no {text:?} in {facts}");
    }
    let link = browser.js("return document.querySelector('#verdict .facts a').getAttribute('href')");
    assert_eq!(link, "../incident-20261121T101500Z-00000001/report.html");
    check_no_complaints(&browser);
}

#[test]
fn the_verdict_comes_first_and_a_click_on_a_rank_opens_its_stacks() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    browser.open(&report_of(folder.path()).0);
    take_pictures(&browser, "verdict");
    let sentence = browser.text("h1");
    assert!(sentence.contains("ank 2"), "{sentence}");
    assert!(browser.text(".culprit-card").contains("gpu-node-000"));
    assert_eq!(browser.count("#strip .cell.culprit"), 1);
    assert!(browser.text("#communicators").contains("1 behind"));
    // The causes that were ruled out are in a section that can be opened.
    assert_eq!(browser.count("#ruled-out[open]"), 0);
    browser.click("#ruled-out summary");
    assert_eq!(browser.count("#ruled-out[open]"), 1);

    browser.click("#cell-2");
    let panel = browser.text("#panel");
    for text in
        ["Rank 2", "First sample", "Last sample", "_next_data", "sem_clockwait", "The same stack in both samples"]
    {
        assert!(panel.contains(text), "no {text:?} in {panel}");
    }
    assert!(panel.contains("1 other thread moved") && panel.contains("4 other threads did not move"), "{panel}");
    browser.click("#panel details.thread summary");
    // The content of a fold is made when it opens, which its click does not wait for.
    let changed = || browser.count("#panel .stack li.changed") == 1;
    wait_until(PATIENCE, "the line of the heartbeat is marked", changed);
    browser.click("#panel details.child > summary");
    let reads = || browser.text("#panel details.child").contains("indexed.py:214");
    wait_until(PATIENCE, "the stack of the worker is shown", reads);
    take_pictures(&browser, "rank-panel");
    browser.click("#close-panel");
    assert_eq!(browser.js("return document.activeElement.id"), "cell-2");

    // Python frames stand between those that started the interpreter and those that it calls.
    browser.click("#tab-mixed");
    let frames = browser.js("return [...document.querySelectorAll('#flame .node b')].map((node) => node.textContent)");
    let frames: Vec<&str> = frames.as_array().expect("a list").iter().filter_map(|frame| frame.as_str()).collect();
    assert_eq!(&frames[..3], ["_start", "__libc_start_main", "<module>"], "{frames:?}");
    assert!(frames.contains(&"cuCtxSynchronize"), "{frames:?}");
    check_no_complaints(&browser);
}

#[test]
fn tasks_and_greenlets_that_wait_are_shown_with_their_rank() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::tasks(folder.path());
    browser.open(&report_of(folder.path()).0);
    browser.click("#cell-1");
    let panel = browser.text("#panel");
    for text in [
        "Tasks and greenlets that wait",
        "12 tasks 'Task-…' await a future\nfetch",
        "Task 'beat' awaits a future · not in the first sample\nbeat",
        "Task 'Task-1' awaits the tasks of a gather\nrollout",
        "2 greenlets 'Greenlet' wait",
    ] {
        assert!(panel.contains(text), "no {text:?} in {panel}");
    }
    assert_eq!(browser.count("#panel .main details.suspended"), 3);
    browser.click("#panel .main details.suspended:nth-of-type(2) summary");
    let shown = || browser.text("#panel .main details.suspended[open]").contains("queues.py:158");
    wait_until(PATIENCE, "the stack of the tasks is shown", shown);
    browser.click("#tab-suspended");
    assert_eq!(browser.count("#flame .node[title^='task@MainThread@1|0']"), 1);
    assert_eq!(browser.count("#flame .node[title^='greenlet@']"), 0, "only main threads are shown");
    browser.click("#main-only");
    assert_eq!(browser.count("#flame .node[title^='greenlet@heartbeat@1|0']"), 1);
    check_no_complaints(&browser);
    take_pictures(&browser, "tasks");
    let summary = summary_of(folder.path());
    let lines: Vec<&str> = summary.lines().filter(|line| line.contains(" of rank 1 ")).collect();
    assert_eq!(
        lines,
        [
            "  12 tasks 'Task-…' of rank 1 await a future at client.py:31 in fetch",
            "  2 greenlets 'Greenlet' of rank 1 wait at pages.py:9 in serve",
            "  task 'beat' of rank 1 awaits a future at train.py:12 in beat",
            "  task 'Task-1' of rank 1 awaits the tasks of a gather at train.py:88 in rollout",
        ]
    );
}

#[test]
fn everything_can_be_done_with_the_keyboard() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    browser.open(&report_of(folder.path()).0);
    let focus = || browser.js("return document.activeElement.textContent").as_str().unwrap_or_default().to_owned();

    browser.keys("/");
    assert_eq!(browser.js("return document.activeElement.id"), "search");
    browser.keys("synchronize");
    assert!(browser.text("#found").starts_with("1 frame on 3 ranks"), "{}", browser.text("#found"));
    browser.keys(ENTER);
    assert_eq!(browser.count("#flame .node.chosen[title^='synchronize@']"), 1);
    browser.keys(ESCAPE);

    browser.js("document.querySelector('#flame [tabindex=\"0\"]').focus()");
    browser.js("document.querySelector('#flame .node').focus()");
    browser.keys(DOWN);
    assert!(focus().starts_with("pretrain@"), "{}", focus());
    browser.keys(DOWN);
    browser.keys(RIGHT);
    assert!(focus().starts_with("train@/work/megatron/training/training.py:1232@0-1/3|2"), "{}", focus());
    browser.keys(ENTER);
    assert_eq!(browser.js("return document.querySelector('#reset-zoom').disabled"), false);
    assert_eq!(browser.count("#flame .node[title^='get_batch']"), 0, "it is not a part of the zoomed frame");
    browser.keys(ESCAPE);
    browser.keys(ESCAPE);
    assert_eq!(browser.count("#flame .node[title^='get_batch']"), 1);

    browser.js("document.querySelector('#cell-0').focus()");
    browser.keys(RIGHT);
    browser.keys(ENTER);
    assert!(browser.text("#panel").starts_with("Rank 1"));
    browser.keys(ESCAPE);
    assert_eq!(browser.js("return document.querySelector('#panel').hidden"), true);
    assert_eq!(browser.js("return document.activeElement.id"), "cell-1");
    check_no_complaints(&browser);
}

#[test]
fn dark_and_light_follow_the_system_until_somebody_chooses() {
    let Some(browser) = browser() else { return };
    let folder = rank6();
    browser.open(&report_of(folder.path()).0);
    let brightness = || {
        let colour = browser.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)");
        colour.as_array().expect("three numbers").iter().filter_map(Value::as_u64).take(3).sum::<u64>()
    };
    browser.scheme("light");
    assert!(brightness() > 600);
    browser.scheme("dark");
    assert!(brightness() < 150);
    browser.click("#theme");
    browser.click("#theme");
    assert_eq!(browser.text("#theme"), "Theme: light");
    assert!(brightness() > 600);
    check_no_complaints(&browser);
}

#[test]
fn the_lanes_show_what_each_rank_did_before_the_hang() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    Timelines { lossy_rank: Some(3), ..HANG }.write(folder.path()).expect("own folder");
    for rank in 0..4 {
        let evaluates_from_ns = if rank == 2 { 40_000_000_000 } else { 370_000_000_000 };
        HANG.write_samples(folder.path(), rank, evaluates_from_ns).expect("own folder");
    }
    browser.open(&report_of(folder.path()).0);
    assert!(browser.text("#lanes-title").contains("Before the hang"));
    let lost = browser.text("#lanes-lost");
    assert!(lost.starts_with("7 operations of 1 rank are missing (rank 3): white space"), "{lost}");
    browser.picture("lanes");
    // The bottom row of a lane is the function in which the rank was.
    let lanes = lanes_of(folder.path());
    let ([evaluates], [trains]) =
        (&bars_of(&lanes, 2, "evaluate (metrics.py)")[..], &bars_of(&lanes, 0, "step (train.py)")[..])
    else {
        panic!("{lanes:#}")
    };
    assert!(evaluates[0] > trains[0] && trains[1] > trains[0], "{evaluates:?} {trains:?}");
    // The culprit is on top. Before the hang is its last operation, after it that of its peer.
    browser.click("#lanes-hang");
    browser.js("document.getElementById('lanes-box').focus()");
    browser.keys("p");
    let detail = browser.text("#lanes-detail");
    assert!(detail.starts_with("rank 2: ") && detail.contains("µs") || detail.contains("ms from "), "{detail}");
    browser.click("#lanes-hang");
    browser.js("document.getElementById('lanes-box').focus()");
    browser.keys(DOWN);
    browser.keys("n");
    let detail = browser.text("#lanes-detail");
    assert!(detail.starts_with("rank 0: ") && detail.contains("pending since"), "{detail}");
    browser.picture("lanes-hang");
    // A group opens: three peers below the culprit.
    let height = || browser.js("return document.querySelector('.lanes-pad').offsetHeight").as_f64().expect("a number");
    let folded = height();
    browser.keys(ENTER);
    assert!(height() > folded, "{folded} to {}", height());
    browser.click("#lanes-search");
    browser.keys("cublasGemm");
    assert!(browser.text("#lanes-found").contains("bars in the shown lanes"), "{}", browser.text("#lanes-found"));
    browser.picture("lanes-open");
    check_no_complaints(&browser);
}

#[test]
fn the_last_operations_of_the_culprit_and_a_peer_are_side_by_side() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    HANG.write(folder.path()).expect("own folder");
    let text = summary_of(folder.path());
    let head = text.lines().find(|line| line.starts_with("rank 2 (culprit)")).unwrap_or_else(|| panic!("{text}"));
    assert!(head.ends_with("rank 0 (peer)"), "{text}");
    let pending = text.lines().find(|line| line.ends_with("pending")).expect("the peer waits");
    assert!(pending.contains("all_reduce of 8388608") && pending.contains("-310.01 s"), "{text}");
}

#[test]
fn the_last_operations_are_shown_for_a_large_job() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::large(folder.path(), 1024, 2);
    // The cluster collector fetches the files of the culprits and of one rank of each group.
    let all = Timelines { ranks: 1024, ranks_per_node: 8, operations: 100, hang: None, ..HANG };
    let culprits = verdict_of(folder.path())["culprits"].as_array().expect("a list").clone();
    let culprit = culprits[0].as_u64().expect("a rank") as u32;
    [culprit, 77].iter().for_each(|rank| all.write_rank(folder.path(), *rank).expect("own folder"));
    let text = summary_of(folder.path());
    let head = text.lines().find(|line| line.starts_with(&format!("rank {culprit} (culprit)")));
    assert!(head.is_some_and(|head| head.ends_with("rank 77 (peer)")), "{text}");
}

/// The lanes in the data of a page.
fn lanes_of(folder: &Path) -> Value {
    let page = fs::read_to_string(report_of(folder).0).expect("it was written");
    let (_, data) = page.split_once("id=\"data\">").expect("the data");
    let report: Value = serde_json::from_str(data.split_once("</script>").expect("its end").0).expect("JSON");
    report["lanes"].clone()
}

/// The bars of a lane with this name: begin, end, waited and sequence number.
fn bars_of(lanes: &Value, rank: usize, name: &str) -> Vec<[u64; 4]> {
    let names = lanes["names"].as_array().expect("a list");
    let numbers: Vec<u64> =
        lanes["lanes"][rank]["bars"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect();
    let mut at = 0;
    let mut bars = Vec::new();
    for bar in numbers.chunks_exact(6) {
        at += bar[0];
        if names[bar[3] as usize]["text"].as_str().is_some_and(|text| text.starts_with(name)) {
            bars.push([at, at + bar[1], bar[2], bar[5]]);
        }
    }
    bars
}

#[test]
fn the_lanes_of_nodes_with_wrong_clocks_are_aligned() {
    // Monotonic clocks 60 s and 50 ppm apart, realtime clocks 7 s apart.
    let timelines = Timelines {
        ranks_per_node: 2,
        clock_step: (60_000_000_000, 50.0),
        realtime_step_ns: -7_000_000_000,
        hang: Some(Hang { behind: 3, lasts_ns: 310_000_000_000 }),
        ..HANG
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    timelines.write(folder.path()).expect("own folder");
    let verdict = folder.path().join("verdict.json");
    let mut changed = verdict_of(folder.path());
    changed["culprits"] = json!([3]);
    fs::write(&verdict, changed.to_string()).expect("own folder");
    let lanes = lanes_of(folder.path());
    let clocks = &lanes["clocks"];
    assert_eq!((&clocks["nodes"], &clocks["refused"]), (&json!(2), &json!([])), "{clocks}");
    assert!(clocks["median_us"].as_f64().is_some_and(|us| us < 50.0), "{clocks}");
    assert!(clocks["corrected_us"].as_f64().is_some_and(|us| (6e6..8e6).contains(&us)), "{clocks}");
    // The ends of an all-gather across the nodes are on top of each other.
    let (here, there) = (bars_of(&lanes, 0, "all_gather"), bars_of(&lanes, 2, "all_gather"));
    assert!(here.len() > 10, "{lanes:#}");
    let mut compared = 0;
    for bar in &here {
        let Some(other) = there.iter().find(|other| other[3] == bar[3] && bar[3] != 0) else { continue };
        if lanes["span_us"].as_u64().is_some_and(|span| bar[1] < span) {
            assert!(bar[1].abs_diff(other[1]) < 100, "{bar:?} {other:?}");
            compared += 1;
        }
    }
    assert!(compared > 5, "{here:?} {there:?}");
    // Rank 2 is beside the culprit, and the first to wait: 7 s later by its own clock.
    let behind = lanes["behind_us"].as_u64().expect("somebody waits");
    let last = bars_of(&lanes, 3, "all_reduce").last().copied().expect("the culprit took part in the one before");
    let expected = timelines.period_ns / 1000 * 14 / 10;
    assert!((behind - last[1]).abs_diff(expected) < 2 * expected, "{behind} {last:?}");
    let Some(browser) = browser() else { return };
    browser.open(&report_of(folder.path()).0);
    let text = browser.text("#lanes-clocks");
    assert!(text.starts_with("The clocks of 2 nodes are aligned on the ends of common collectives"), "{text}");
    browser.click("#lanes-hang");
    browser.picture("lanes-aligned");
    check_no_complaints(&browser);
}

#[test]
fn lanes_whose_clocks_cannot_be_aligned_are_marked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::small(folder.path());
    // One rank of each of two nodes. They have no communicator in common.
    let timelines = Timelines { ranks_per_node: 2, hang: None, ..HANG };
    [0, 3].iter().for_each(|rank| timelines.write_rank(folder.path(), *rank).expect("own folder"));
    let lanes = lanes_of(folder.path());
    assert_eq!(lanes["clocks"]["refused"], json!(["node-1"]));
    let marks: Vec<bool> = (0..2).filter_map(|lane| lanes["lanes"][lane]["unaligned"].as_bool()).collect();
    assert_eq!(marks, [false, true]);
    assert!(lanes["names"].to_string().contains("all_reduce") && lanes["clocks"]["median_us"].is_null(), "{lanes:#}");
    let text = summary_of(folder.path());
    assert!(!text.contains("Last operations"), "the culprit has no timeline: {text}");
    let Some(browser) = browser() else { return };
    browser.open(&report_of(folder.path()).0);
    let clocks = browser.text("#lanes-clocks");
    assert!(clocks.contains("Not aligned: node-1. No collective is common"), "{clocks}");
    browser.picture("lanes-clocks");
    check_no_complaints(&browser);
}

#[test]
fn a_thousand_ranks_are_a_small_file_and_open_at_once() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::large(folder.path(), 1024, 117);
    let (report, took) = report_of(folder.path());
    let bytes = fs::metadata(&report).expect("it was written").len();
    assert!(bytes < 4_000_000, "{bytes} bytes");
    let start = Instant::now();
    browser.open(&report);
    let opened = start.elapsed();
    eprintln!("1,024 ranks: viewer {took:?}, report {bytes} bytes, opened in {opened:?}");
    // An order of magnitude of room for a loaded machine.
    assert!(opened < Duration::from_secs(15), "{opened:?}");
    assert_eq!(browser.count("#strip .cell"), 1024);
    for condition in ["stopped", "d_state", "dead", "no_dump"] {
        assert_eq!(browser.count(&format!("#strip .cell.{condition}")), 1, "{condition}");
    }
    take_pictures(&browser, "large");
    // One rank of a thousand is less than a pixel wide, but it is a culprit.
    browser.click("#flame .many.culprit");
    assert!(browser.text("#detail").contains("@389|0-388/390-1023"), "{}", browser.text("#detail"));
    browser.picture("large-zoomed");
    browser.click("#reset-zoom");
    browser.click("#main-only");
    let drawn = browser.count("#flame .node, #flame .many");
    assert!((10..3000).contains(&drawn), "{drawn} frames are in the page");
    browser.click("#cell-389");
    assert!(browser.text("#panel").contains("115 other threads did not move"), "{}", browser.text("#panel"));
    check_no_complaints(&browser);
}

/// Zooms in and out, scrolls to the end and searches. Returns how long the slowest frame of each
/// took, in milliseconds.
const LANES_IN_MOTION: &str = r#"return (async () => {
    const byId = (id) => document.getElementById(id);
    const slowest = async (steps) => {
        let worst = 0;
        for (const step of steps) {
            const start = performance.now();
            step();
            // The lanes have asked for their frame first.
            await new Promise((done) => requestAnimationFrame(done));
            worst = Math.max(worst, performance.now() - start);
        }
        return worst;
    };
    const click = (id, count) => Array.from({ length: count }, () => () => byId(id).click());
    const box = byId("lanes-box");
    const search = byId("lanes-search");
    const type = (text) => () => {
        search.value = text;
        search.dispatchEvent(new Event("input"));
    };
    const zoom = await slowest([...click("lanes-in", 12), ...click("lanes-out", 12)]);
    const scroll = await slowest([1, 2, 3, 4].map((part) => () => (box.scrollTop = (box.scrollHeight * part) / 4)));
    return [zoom, scroll, await slowest([type("all_reduce"), type("no such operation"), type("")])];
})()"#;

#[test]
fn the_lanes_of_a_thousand_ranks_are_fluent() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::large(folder.path(), 1024, 1);
    let hang = Some(Hang { behind: 389, lasts_ns: 310_000_000_000 });
    Timelines { ranks: 1024, ranks_per_node: 8, hang, ..HANG }.write(folder.path()).expect("own folder");
    let (report, took) = report_of(folder.path());
    let bytes = fs::metadata(&report).expect("it was written").len();
    let start = Instant::now();
    browser.open(&report);
    let opened = start.elapsed();
    let rows = || {
        let height = browser.js("return document.querySelector('.lanes-pad').offsetHeight").as_f64();
        height.expect("a number") / 26.0
    };
    let check_motion = |what: &str| {
        let slowest: Vec<f64> =
            browser.js(LANES_IN_MOTION).as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
        eprintln!("{what}: slowest frames of zoom, scroll and search {slowest:.0?} ms");
        // Two orders of magnitude of room for a loaded machine.
        assert!(slowest.len() == 3 && slowest.iter().all(|ms| *ms < 3000.0), "{slowest:?}");
    };
    eprintln!("lanes of 1,024 ranks: viewer {took:?}, report {bytes} bytes, opened in {opened:?}");
    assert!(bytes < 10_000_000, "{bytes} bytes");
    assert!(opened < Duration::from_secs(20), "{opened:?}");
    let folded = rows();
    assert!(folded < 50.0, "{folded} rows");
    browser.js("document.getElementById('lanes').scrollIntoView()");
    browser.picture("lanes-large");
    check_motion("folded");
    // The group of those that wait is large.
    browser.js("document.getElementById('lanes-box').focus()");
    for _ in 0..folded as usize {
        browser.keys(DOWN);
        if rows() < 500.0 {
            browser.keys(ENTER);
            browser.js("document.getElementById('lanes-box').focus()");
        }
    }
    assert!(rows() > 900.0, "{} rows", rows());
    check_motion("unfolded");
    browser.click("#lanes-hang");
    browser.picture("lanes-large-unfolded");
    check_no_complaints(&browser);
}

#[test]
fn hostile_names_are_shown_as_text() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    folders::hostile(folder.path());
    browser.open(&report_of(folder.path()).0);
    assert!(browser.text("h1").starts_with("</script><script>document.title"));
    browser.click("#cell-0");
    browser.click("#flame .node");
    assert_eq!(browser.count("img"), 0);
    assert_eq!(browser.count("script"), 2);
    assert_ne!(browser.js("return document.title"), "owned");
    assert!(browser.text("#panel").contains("onerror="));
    assert!(browser.fits());
    check_no_complaints(&browser);
}
