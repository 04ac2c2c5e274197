//! The kernel that carries loops out, as it is compiled.

/// The kernel, in CUDA C.
pub const KERNEL: &str = include_str!("copy.cu");
/// What it includes.
pub const KERNEL_HEADER: (&str, &str) = ("loops.h", include_str!("loops.h"));
