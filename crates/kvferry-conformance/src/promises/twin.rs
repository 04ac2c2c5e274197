//! What the stand-in for CUDA's driver (driver.c) is told to do.

use std::fs::File;
use std::path::PathBuf;

use crate::peer::wait_until;

/// Tells the twin of this process, and of those that it starts from now on.
pub(super) fn twin(variable: &str, value: &str) {
    // SAFETY: no other thread looks at the environment meanwhile: the twin's streams do so when they have
    // work, and they have none.
    unsafe { std::env::set_var(variable, value) };
}

pub(super) fn twin_refuses(what: &str) {
    twin("KVFERRY_TWIN_REFUSES", what);
}

/// Where kernels wait before they move anything, until it is dropped.
pub(super) struct Gate(PathBuf);

impl Gate {
    pub(super) fn close() -> Self {
        let path = std::env::temp_dir().join(format!("kvferry-gate-{}", std::process::id()));
        File::create(&path).unwrap();
        twin("KVFERRY_TWIN_GATE", path.to_str().unwrap());
        Self(path)
    }

    /// Made by the first kernel that waits.
    fn knock(&self) -> PathBuf {
        self.0.with_extension("knock")
    }

    pub(super) fn wait_for_a_kernel(&self) {
        wait_until("a kernel is at the gate", || self.knock().exists());
    }

    pub(super) fn open(self) {
        drop(self);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.knock());
        std::fs::remove_file(&self.0).unwrap();
    }
}
