//! NIXL's wheels: one for each CUDA. The plugins of one see no GPU memory where only the runtime of another is there.

use std::fs;
use std::sync::OnceLock;

use kvferry_cuda::driver;

/// A wheel of the version that everything here is tested with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wheel {
    /// The major version of CUDA.
    cuda: u32,
    /// As pip checks them: x86_64 and aarch64.
    pub(super) hashes: [&'static str; 2],
}

/// The oldest first.
pub(super) static ALL: [Wheel; 2] = [
    Wheel {
        cuda: 12,
        hashes: [
            "sha256:341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
            "sha256:aced5529cc9781f8be1ee22e451c852630455460c1812b06cc863b05d797f2db",
        ],
    },
    Wheel {
        cuda: 13,
        hashes: [
            "sha256:6279834382eeabab60bfc2fe62c2363cda3bf520278bbd4a007932cc76073de5",
            "sha256:8c378f132e6744e8fc5583109bc694a7b1e996bd21eeca08de8b1dbfdd9ebae7",
        ],
    },
];

impl Wheel {
    /// What pip knows it by.
    pub(super) fn name(&self) -> String {
        format!("nixl-cu{}", self.cuda)
    }

    /// Where its libraries are, among Python's packages.
    pub(super) fn folder(&self) -> String {
        format!(".nixl_cu{}.mesonpy.libs", self.cuda)
    }

    /// Tells its directory from that of the oldest, which was once the only one.
    pub(super) fn suffix(&self) -> String {
        if self == &ALL[0] { String::new() } else { format!("-cu{}", self.cuda) }
    }
}

/// The wheel for the CUDA of this process: that of the runtime that it has loaded, as PyTorch does; else that of the
/// driver. Without either, or for a CUDA that is older or newer than all of them, the nearest one.
pub(super) fn fitting() -> &'static Wheel {
    static FITTING: OnceLock<&'static Wheel> = OnceLock::new();
    FITTING.get_or_init(|| {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let cuda = runtime(&maps).or_else(driver::major_version);
        for_cuda(cuda.unwrap_or(0))
    })
}

fn for_cuda(cuda: u32) -> &'static Wheel {
    ALL.iter().rfind(|wheel| wheel.cuda <= cuda).unwrap_or(&ALL[0])
}

/// The major version of CUDA's runtime among the files that a process has mapped.
fn runtime(maps: &str) -> Option<u32> {
    let versions = maps.split("/libcudart.so.").skip(1);
    versions.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_that_is_loaded_says_which_wheel() {
        let line = |name: &str| format!("7f10-7f20 r-xp 00000000 fe:00 17 /opt/lib/{name}\n");
        let maps = |names: &[&str]| names.iter().map(|name| line(name)).collect::<String>();
        assert_eq!(runtime(&maps(&["libc.so.6", "libcudart.so.12"])), Some(12));
        assert_eq!(runtime(&maps(&["libcudart.so.13.0.96", "libcudart.so.13.0.96"])), Some(13));
        // A name with something before it, as wheels make it, is somebody's own copy.
        assert_eq!(runtime(&maps(&["libcuda.so.1", "my-libcudart.so.12", "libcudart.so.x"])), None);
        assert_eq!(runtime(""), None);
    }

    #[test]
    fn there_is_a_wheel_for_every_cuda() {
        let named = |cuda| for_cuda(cuda).name();
        assert_eq!([0, 11, 12].map(named), ["nixl-cu12"; 3].map(String::from));
        assert_eq!([13, 14].map(named), ["nixl-cu13"; 2].map(String::from));
        assert_eq!(ALL.each_ref().map(Wheel::suffix), ["".to_owned(), "-cu13".to_owned()]);
    }
}
