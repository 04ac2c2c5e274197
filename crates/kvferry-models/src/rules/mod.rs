//! Where engines put a model's states. Each engine's rules are a module of their own.

pub mod sglang;
pub mod topology;
pub mod vllm;
