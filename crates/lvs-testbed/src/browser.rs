//! A headless browser that tests of the dashboard control by WebDriver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::netns::wait_until;
use crate::{Host, Proc};

const PORT: u16 = 9515;

/// A browser on a host.
#[derive(Debug)]
pub struct Browser {
    host: Host,
    session: String,
    /// File with the body of a WebDriver request: a script may be too long for a command-line
    /// argument.
    body: PathBuf,
    _driver: Proc,
}

impl Browser {
    /// Starts a browser on `host`, with its files below `directory`.
    ///
    /// # Errors
    /// The browser does not start.
    pub fn start(host: &Host, directory: &Path) -> Result<Self> {
        let home = directory.join("browser");
        std::fs::create_dir_all(&home)?;
        let mut command = host.command("chromedriver");
        command.arg(format!("--port={PORT}"));
        command.env("HOME", &home).env("XDG_CONFIG_HOME", &home);
        let driver = host.spawn_command("chromedriver", command)?;
        host.wait_for_port("tcp", PORT)?;
        let arguments = [
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--disable-background-networking".to_owned(),
            "--hide-scrollbars".to_owned(),
            "--window-size=1280,900".to_owned(),
            format!("--user-data-dir={}", home.join("profile").display()),
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "timeouts": {"script": 120_000},
        }}});
        let mut browser = Self {
            host: host.clone(),
            session: String::new(),
            body: home.join("request.json"),
            _driver: driver,
        };
        let session = browser.ask("POST", "/session", Some(&wanted))?;
        let id = session["sessionId"]
            .as_str()
            .context("chromedriver started no session")?;
        browser.session = format!("/session/{id}");
        Ok(browser)
    }

    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let url = format!("http://127.0.0.1:{PORT}{}{path}", self.session);
        let mut words = ["-sS", "-m", "150", "-X", method, &url]
            .map(str::to_owned)
            .to_vec();
        if let Some(body) = body {
            std::fs::write(&self.body, body.to_string())?;
            let file = format!("@{}", self.body.display());
            words.extend(["--data-binary".to_owned(), file]);
        }
        let text = self.host.run("curl", &words)?;
        let mut answer: Value = serde_json::from_str(&text).with_context(|| {
            format!("chromedriver answered {method} {path} without JSON: {text}")
        })?;
        let value = answer["value"].take();
        let failed = value.get("error").and_then(Value::as_str);
        ensure!(
            failed.is_none(),
            "chromedriver refused {method} {path}: {value}"
        );
        Ok(value)
    }

    /// Opens a page.
    ///
    /// # Errors
    /// The error of the browser.
    pub fn open(&self, url: &str) -> Result<()> {
        self.ask("POST", "/url", Some(&json!({ "url": url })))?;
        Ok(())
    }

    /// Runs JavaScript. Returns the result of the script. If it is a promise, waits for the
    /// promise, and returns the promised value.
    ///
    /// # Errors
    /// The error of the browser.
    pub fn run(&self, script: &str) -> Result<Value> {
        let body = json!({ "script": script, "args": [] });
        self.ask("POST", "/execute/sync", Some(&body))
    }

    /// Returns the visible text of the first element that matches a CSS selector; an empty text if
    /// no element matches.
    ///
    /// # Errors
    /// The error of the browser.
    pub fn text(&self, selector: &str) -> Result<String> {
        let script = format!(
            "const e = document.querySelector({}); return e ? e.innerText : '';",
            Value::from(selector)
        );
        Ok(self.run(&script)?.as_str().unwrap_or_default().to_owned())
    }

    fn element(&self, selector: &str) -> Result<String> {
        let body = json!({ "using": "css selector", "value": selector });
        let found = self.ask("POST", "/element", Some(&body))?;
        let id = found.as_object().and_then(|o| o.values().next());
        let id = id
            .and_then(Value::as_str)
            .context("WebDriver returned no element")?;
        Ok(id.to_owned())
    }

    /// Clicks on the first element that matches a CSS selector.
    ///
    /// # Errors
    /// If the element does not exist, or is not visible.
    pub fn click(&self, selector: &str) -> Result<()> {
        let id = self.element(selector)?;
        self.ask("POST", &format!("/element/{id}/click"), Some(&json!({})))?;
        Ok(())
    }

    /// Types into the first element that matches a CSS selector.
    ///
    /// # Errors
    /// If the element does not exist, or is not visible.
    pub fn type_into(&self, selector: &str, text: &str) -> Result<()> {
        let id = self.element(selector)?;
        let body = json!({ "text": text });
        self.ask("POST", &format!("/element/{id}/value"), Some(&body))?;
        Ok(())
    }

    /// Presses a key in the focused element. For keys like Enter, `key` is a private-use character
    /// of WebDriver.
    ///
    /// # Errors
    /// The error of the browser.
    pub fn press(&self, key: char) -> Result<()> {
        let keys = [
            json!({"type": "keyDown", "value": key}),
            json!({"type": "keyUp", "value": key}),
        ];
        let body = json!({"actions": [{"type": "key", "id": "keyboard", "actions": keys}]});
        self.ask("POST", "/actions", Some(&body))?;
        Ok(())
    }

    /// Waits until an element's text contains these words.
    ///
    /// # Errors
    /// If the text does not contain them within `limit`.
    pub fn wait_for(&self, selector: &str, words: &str, limit: Duration) -> Result<()> {
        wait_until(
            &format!("the element {selector} to contain {words:?}"),
            limit,
            || self.text(selector).is_ok_and(|text| text.contains(words)),
        )
        .with_context(|| self.text("body").unwrap_or_default())
    }

    /// Emulates a screen of this size in CSS pixels, with a light or dark colour scheme. A screen
    /// narrower than 600 pixels is that of a mobile device.
    ///
    /// # Errors
    /// The error of the browser.
    pub fn screen(&self, width: u32, height: u32, dark: bool) -> Result<()> {
        let scheme = if dark { "dark" } else { "light" };
        for (command, parameters) in [
            (
                "Emulation.setDeviceMetricsOverride",
                json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}),
            ),
            (
                "Emulation.setEmulatedMedia",
                json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
            ),
        ] {
            let body = json!({ "cmd": command, "params": parameters });
            self.ask("POST", "/goog/cdp/execute", Some(&body))?;
        }
        Ok(())
    }

    /// Writes a screenshot as a PNG file.
    ///
    /// # Errors
    /// The screenshot cannot be made or written.
    pub fn picture(&self, file: &Path) -> Result<()> {
        let picture = self.ask("GET", "/screenshot", None)?;
        let text = picture.as_str().context("WebDriver returned no picture")?;
        let coded = file.with_extension("base64");
        std::fs::write(&coded, text)?;
        let script = format!("base64 -d {} >{}", coded.display(), file.display());
        self.host.sh(&script)?;
        std::fs::remove_file(&coded)?;
        Ok(())
    }
}
