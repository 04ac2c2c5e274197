//! What the agents of a test say in the log.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

/// What all agents of this process say.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub fn start() -> Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        let log = LOG.get_or_init(Self::default).clone();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        _ = lines.try_init();
        log
    }

    /// How many lines there are with this text.
    pub fn lines(&self, text: &str) -> usize {
        let said = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        said.lines().filter(|line| line.contains(text)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
