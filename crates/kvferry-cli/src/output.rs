//! Standard output.

use std::io::Write;

/// Prints text. Whoever reads it may stop reading at any time (`kvferry models | head`): that is not an
/// error.
pub(crate) fn print(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}
