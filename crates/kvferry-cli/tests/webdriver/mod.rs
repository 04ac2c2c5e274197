//! As much of a WebDriver client as the browser test needs.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use ureq::Agent;

/// A headless browser.
pub(crate) struct Browser {
    driver: Child,
    /// How to reach the driver, and where its sessions are.
    agent: Agent,
    sessions: String,
    /// The session's name, once there is one.
    session: String,
}

/// How often chromedriver is started: it takes a port that is free for IPv6, and ends where somebody has the same one for
/// IPv4.
const STARTS: usize = 10;

/// A chromedriver, and its port.
fn driver() -> (Child, u16) {
    let mut said = vec![];
    for _ in 0..STARTS {
        let mut driver = Command::new("chromedriver")
            .args(["--port=0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver starts: install chromium-driver, or run tools/test-explain.sh");
        let mut lines = BufReader::new(driver.stdout.take().expect("it is piped")).lines();
        let port = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let port = line.split_once("started successfully on port ");
            let port = port.and_then(|(_, port)| port.trim_end_matches('.').parse().ok());
            said.push(line);
            port
        });
        if let Some(port) = port {
            // Keep reading, so that it never blocks on a full pipe.
            std::thread::spawn(move || lines.for_each(drop));
            return (driver, port);
        }
        driver.wait().expect("it has ended");
    }
    panic!("chromedriver does not say its port; it says: {said:#?}");
}

impl Browser {
    /// Starts chromedriver and a browser with a fresh profile in `folder`.
    pub(crate) fn start(folder: &Path) -> Self {
        let (driver, port) = driver();
        let agent = Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(120)))
            // Errors come with a body that says what is wrong.
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let sessions = format!("http://127.0.0.1:{port}/session");
        let mut browser = Self { driver, agent: agent.into(), sessions, session: String::new() };
        let profile = folder.join("profile");
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1280,1000",
            &format!("--user-data-dir={}", profile.display()),
        ];
        let options = json!({ "args": arguments });
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options } } });
        let answer = browser.post(&browser.sessions, &wanted);
        browser.session = answer["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    /// Opens a page.
    pub(crate) fn open(&self, url: &str) {
        self.command("url", &json!({ "url": url }));
    }

    /// Runs a script in the page and returns its value.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.command("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Presses and releases a key, for whatever has the focus.
    pub(crate) fn press(&self, key: &str) {
        let actions = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": [
            { "type": "keyDown", "value": key }, { "type": "keyUp", "value": key },
        ] }] });
        self.command("actions", &actions);
    }

    /// Makes the page believe that the reader prefers light or dark.
    pub(crate) fn scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        let parameters = json!({ "features": features });
        let command = json!({ "cmd": "Emulation.setEmulatedMedia", "params": parameters });
        self.command("goog/cdp/execute", &command);
    }

    /// Ends the browser.
    pub(crate) fn stop(self) {
        drop(self);
    }

    fn command(&self, name: &str, body: &Value) -> Value {
        self.post(&format!("{}/{}/{name}", self.sessions, self.session), body)
    }

    fn post(&self, url: &str, body: &Value) -> Value {
        let sent = self.agent.post(url).content_type("application/json").send(body.to_string());
        let answer = sent.expect("chromedriver answers").into_body().read_to_string();
        let answer = answer.expect("chromedriver ends its answer");
        let answer: Value = serde_json::from_str(&answer).expect("chromedriver answers in JSON");
        let value = answer["value"].clone();
        assert!(value["error"].is_null(), "{url}: {value}");
        value
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let _ = self.agent.delete(format!("{}/{}", self.sessions, self.session)).call();
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
