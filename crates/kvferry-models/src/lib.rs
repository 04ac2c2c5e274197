//! Models and engines as facts.
//!
//! [`families::read`] turns a Hugging Face `config.json` into a [`Model`]: every state that the model
//! keeps of a prompt, free of any parallelism. [`presets`] are such configurations of released models.
//! [`rules`] say where an engine puts those states: [`rules::vllm`] gives the manifest of every rank
//! for a model and a [`Topology`].
//!
//! ```
//! use kvferry_models::{Topology, presets, rules::vllm};
//!
//! let model = presets::find("kimi-linear")?.model()?;
//! let topology: Topology = "tp=4".parse()?;
//! let ranks = vllm::manifests(&model, &topology, "prefill")?;
//! assert_eq!(ranks.len(), 4);
//! assert_eq!(ranks[0].groups().len(), 4); // 7 latent layers, 20 delta-attention layers in three
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod error;
mod facts;
pub mod families;
mod model;
pub mod presets;
pub mod rules;
pub mod suggest;

pub use error::{ConfigError, FactsError, RulesError, TopologyError};
pub use facts::{Facts, StateKind, States};
pub use model::{
    Cache, Footprint, Limit, Model, Packing, Recurrence, Rule, Sort, Split, State, Tensor,
};
pub use rules::topology::{CacheType, Conv, Layout, Scale, Topology};
