//! Refusals of the engine itself.

use crate::error::RulesError;
use crate::model::Model;

/// The engine's name in messages.
pub const ENGINE: &str = "vLLM 0.32";

/// The engine would not run the model with this setting.
pub(super) fn cannot_run(model: &Model, setting: String, reason: String) -> RulesError {
    RulesError::CannotRun { engine: ENGINE, model: model.name.clone(), setting, reason }
}
