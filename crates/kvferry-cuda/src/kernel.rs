//! The kernel that carries loops out, as it is compiled.

/// The kernel, in CUDA C.
pub const KERNEL: &str = include_str!("copy.cu");
/// What it includes.
pub const KERNEL_HEADER: (&str, &str) = ("loops.h", include_str!("loops.h"));

/// What carries out the same on the CPU, in C: for stand-ins of a driver.
#[doc(hidden)]
pub const ON_THE_CPU: [(&str, &str); 2] = [("host.c", include_str!("host.c")), KERNEL_HEADER];
