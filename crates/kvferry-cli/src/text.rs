//! Text for people: aligned columns, sizes, numbers.

use std::fmt::Write as _;

/// Rows under a heading. Columns are as wide as their widest cell; numbers stand on the right.
pub(crate) struct Columns {
    heading: Vec<&'static str>,
    /// Whether a column stands on the right.
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
    /// Row numbers before which a rule is drawn.
    rules: Vec<usize>,
}

impl Columns {
    /// No rows yet. A heading that starts with `>` stands on the right.
    pub(crate) fn new(heading: &[&'static str]) -> Self {
        Self {
            right: heading.iter().map(|word| word.starts_with('>')).collect(),
            heading: heading.iter().map(|word| word.trim_start_matches('>')).collect(),
            rows: vec![],
            rules: vec![],
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Draws a rule before the next row.
    pub(crate) fn rule(&mut self) {
        self.rules.push(self.rows.len());
    }

    pub(crate) fn render(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.heading[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.heading.len()).map(width).collect();
        let total = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        let mut text = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for (column, cell) in cells.enumerate() {
                let width = widths[column];
                let gap = if column > 0 { "  " } else { "" };
                match self.right[column] {
                    true => write!(line, "{gap}{cell:>width$}"),
                    false => write!(line, "{gap}{cell:<width$}"),
                }
                .expect("strings can be written to");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        };
        line(&mut self.heading.iter().copied());
        let rule = "─".repeat(total);
        line(&mut [rule.as_str()].into_iter());
        for (number, row) in self.rows.iter().enumerate() {
            if self.rules.contains(&number) {
                line(&mut [rule.as_str()].into_iter());
            }
            line(&mut row.iter().map(String::as_str));
        }
        text
    }
}

/// A number as people write it: `32k` is 32 × 1024.
pub(crate) fn parse_number(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.to_ascii_lowercase().strip_suffix(['k', 'm']) {
        Some(_) if text.ends_with(['k', 'K']) => (&text[..text.len() - 1], 1 << 10),
        Some(_) => (&text[..text.len() - 1], 1 << 20),
        None => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|error| match digits.parse::<u128>() {
        Ok(_) => "the number is too large".to_owned(),
        Err(_) => format!("{error}"),
    })?;
    number.checked_mul(unit).ok_or_else(|| "the number is too large".to_owned())
}

/// A number of bytes for people: `1.5 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A number with its thousands apart: `1 234 567`.
pub(crate) fn number(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A number by its first three figures: `4.65`, `0.0123`, `1230`.
pub(crate) fn figures(number: f64) -> String {
    let places = 2 - number.abs().max(1e-9).log10().floor() as i32;
    let text = format!("{number:.*}", places.clamp(0, 9) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A time: `215 ms`, `3.2 s`.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        long if long >= 1.0 => format!("{} s", figures(long)),
        short if short >= 1e-3 => format!("{} ms", figures(1e3 * short)),
        short => format!("{} µs", figures(1e6 * short)),
    }
}

/// A number of things: `1 rank`, `2 ranks`.
pub(crate) fn many(count: u64, word: &str) -> String {
    format!("{} {word}{}", number(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(bytes(1536 * 1024), "1.5 MiB");
        assert_eq!(number(1_234_567), "1 234 567");
        assert_eq!(number(12), "12");
        assert_eq!(
            [4.651, 0.01234, 1234.0, 100.0, 0.0].map(figures),
            ["4.65", "0.0123", "1234", "100", "0"]
        );
        assert_eq!([2.0, 0.2147, 0.0000021].map(seconds), ["2 s", "215 ms", "2.1 µs"]);
        assert_eq!(["32k", "1M", "8192"].map(parse_number), [Ok(32768), Ok(1 << 20), Ok(8192)]);
    }
}
