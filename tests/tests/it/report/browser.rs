//! A headless Chromium, driven by chromedriver over WebDriver, which is plain HTTP.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use xpu_timer_tests::{PATIENCE, Process, skip, wait_until};

/// One browser at a time: several would only make each other slow.
static TURN: Mutex<()> = Mutex::new(());

/// The key of an element in WebDriver's answers.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Keys that have no character.
pub const ENTER: &str = "\u{e007}";
pub const ESCAPE: &str = "\u{e00c}";
pub const DOWN: &str = "\u{e015}";
pub const RIGHT: &str = "\u{e014}";

/// A browser with one page. It ends with this value.
pub struct Browser {
    agent: ureq::Agent,
    session: String,
    _driver: Process,
    _profile: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Starts a browser, after installing Debian's if there is none; says why when there is none even
/// then.
pub fn browser() -> Option<Browser> {
    // A test that failed with the browser in its hands has poisoned nothing.
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let there = || ["chromium", "chromedriver"].iter().all(|name| runs(name));
    if !there() {
        let install = "apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver";
        // The next look shows whether that worked.
        let _ = Command::new("sh").args(["-c", install]).env("DEBIAN_FRONTEND", "noninteractive").output();
    }
    if !there() {
        skip("chromium or chromedriver is missing (Debian: apt-get install chromium chromium-driver)");
        return None;
    }
    Some(Browser::start(turn))
}

/// Whether it runs: a package that is half installed has the program and not its libraries.
fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

impl Browser {
    fn start(turn: MutexGuard<'static, ()>) -> Self {
        let mut driver = Process::spawn(Command::new("chromedriver").arg("--port=0"));
        let ready = "started successfully on port ";
        driver.wait_for(ready, PATIENCE);
        let mut port = None;
        // The line may have come without its end.
        wait_until(PATIENCE, "chromedriver names its port", || {
            let stdout = driver.stdout();
            let rest = stdout.split_once(ready).map(|(_, rest)| rest.to_owned()).unwrap_or_default();
            port = rest.split_once('.').and_then(|(port, _)| port.parse::<u16>().ok());
            port.is_some()
        });
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .proxy(None)
            .build()
            .into();
        let profile = tempfile::tempdir().expect("a folder for the profile");
        let base = format!("http://127.0.0.1:{}", port.expect("named above"));
        let mut arguments: Vec<String> = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--window-size=1280,900",
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.push(format!("--user-data-dir={}", profile.path().display()));
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let answer = send(&agent, &format!("{base}/session"), &capabilities);
        let session = answer["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {answer}")).to_owned();
        let session = format!("{base}/session/{session}");
        Browser { agent, session, _driver: driver, _profile: profile, _turn: turn }
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        send(&self.agent, &format!("{}/{path}", self.session), body)
    }

    fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.post("goog/cdp/execute", &json!({"cmd": command, "params": parameters}))
    }

    /// Opens a file from disk.
    pub fn open(&self, file: &Path) {
        self.post("url", &json!({"url": format!("file://{}", file.display())}));
    }

    /// Runs the body of a function in the page and returns what it returns.
    pub fn js(&self, body: &str) -> Value {
        self.post("execute/sync", &json!({"script": body, "args": []}))
    }

    /// The text of the first element that a CSS selector finds.
    pub fn text(&self, css: &str) -> String {
        let script = format!("return document.querySelector({})?.innerText ?? null", Value::from(css));
        self.js(&script).as_str().unwrap_or_else(|| panic!("no element {css}")).to_owned()
    }

    /// Number of elements that a CSS selector finds.
    pub fn count(&self, css: &str) -> u64 {
        self.js(&format!("return document.querySelectorAll({}).length", Value::from(css))).as_u64().expect("a number")
    }

    /// Clicks in the middle of an element with the mouse. An element that something else covers is
    /// an error.
    pub fn click(&self, css: &str) {
        let found = self.post("element", &json!({"using": "css selector", "value": css}));
        let element = found[ELEMENT].as_str().unwrap_or_else(|| panic!("no element {css}: {found}"));
        self.post(&format!("element/{element}/click"), &json!({}));
    }

    /// Presses keys, wherever the focus is.
    pub fn keys(&self, keys: &str) {
        let actions: Vec<Value> = keys
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()})))
            .collect();
        self.post("actions", &json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}));
    }

    /// `light` or `dark`, as the system would say it.
    pub fn scheme(&self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.devtools("Emulation.setEmulatedMedia", &json!({"features": features}));
    }

    /// Size of the window; a phone also zooms and touches like one.
    pub fn size(&self, width: u32, height: u32, phone: bool) {
        let scale = if phone { 2 } else { 1 };
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone});
        self.devtools("Emulation.setDeviceMetricsOverride", &metrics);
        // The page lays out its frames again when the next picture is drawn.
        let drawn = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)))";
        self.post("execute/async", &json!({"script": drawn, "args": []}));
    }

    /// A picture of the whole page.
    pub fn picture(&self, name: &str) -> PathBuf {
        let parameters = json!({"captureBeyondViewport": true, "clip": self.js(
            "return {x: 0, y: 0, scale: 1, width: document.documentElement.clientWidth,
                     height: Math.min(6000, document.documentElement.scrollHeight)}"
        )});
        let answer = self.devtools("Page.captureScreenshot", &parameters);
        let png = STANDARD.decode(answer["data"].as_str().expect("a picture")).expect("base64");
        let executable = std::env::current_exe().expect("a path");
        let target = executable.ancestors().nth(3).expect("the executable lies in target/PROFILE/deps");
        let path = target.join("pictures").join(format!("{name}.png"));
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("target can be written");
        std::fs::write(&path, png).expect("target can be written");
        path
    }

    /// Messages on the page's console since the last call, failed requests and uncaught errors
    /// included.
    pub fn complaints(&self) -> Vec<String> {
        let log = self.post("se/log", &json!({"type": "browser"}));
        let entries = log.as_array().cloned().unwrap_or_default();
        entries.iter().map(|entry| format!("{}: {}", entry["level"], entry["message"])).collect()
    }

    /// The page is never wider than the window.
    pub fn fits(&self) -> bool {
        self.js("return document.documentElement.scrollWidth <= window.innerWidth") == Value::Bool(true)
    }
}

fn send(agent: &ureq::Agent, url: &str, body: &Value) -> Value {
    let response = agent.post(url).header("content-type", "application/json").send(body.to_string());
    let mut response = response.unwrap_or_else(|error| panic!("{url}: {error}"));
    // Pictures of a whole page exceed the default message size.
    let text = response.body_mut().with_config().limit(64 << 20).read_to_string();
    let answer: Value = serde_json::from_str(&text.expect("an answer")).expect("WebDriver speaks JSON");
    let value = answer["value"].clone();
    assert!(value.get("error").is_none(), "{url}: {} {}", value["error"], value["message"]);
    value
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Ends the browser; the driver is killed afterwards. A browser that has crashed is gone
        // already.
        let request = self.agent.delete(&self.session).config().timeout_global(Some(Duration::from_secs(10))).build();
        let _ = request.call();
    }
}
