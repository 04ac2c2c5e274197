//! Exposed time against the prompt's length, as a picture.

use std::fmt::Write;

use super::{Row, Ways};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 120.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;

/// One line for each way. Lengths double from one tick to the next.
pub(super) fn svg(rows: &[Row]) -> String {
    type Pick = fn(&Ways) -> f64;
    let ways: [(&str, &str, Pick); 4] = [
        ("sequential", "#c0392b", |ways| ways.sequential),
        ("following", "#2471a3", |ways| ways.following),
        ("by layer", "#1e8449", |ways| ways.by_layer),
        ("no limit", "#7f8c8d", |ways| ways.unlimited),
    ];
    let highest = rows.iter().flat_map(|row| ways.iter().map(|way| way.2(&row.exposed)));
    let highest = nice(highest.fold(1.0, f64::max));
    let lengths = || rows.iter().map(|row| row.tokens as f64);
    let (shortest, longest) = (lengths().fold(f64::MAX, f64::min), lengths().fold(1.0, f64::max));
    let span = (longest / shortest).log2().max(1.0);
    let x = |tokens: u64| LEFT + (tokens as f64 / shortest).log2() / span * (WIDTH - LEFT - RIGHT);
    let y = |ms: f64| HEIGHT - BOTTOM - ms / highest * (HEIGHT - TOP - BOTTOM);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for tick in 0..=4 {
        let ms = highest * f64::from(tick) / 4.0;
        let (at, right) = (y(ms), WIDTH - RIGHT);
        line(&mut out, &[(LEFT, at), (right, at)], "#dddddd", 1.0);
        text(&mut out, (LEFT - 6.0, at + 4.0), "end", "#333333", &format!("{ms}"));
    }
    for row in rows {
        let label = match row.tokens % 1024 {
            0 => format!("{}k", row.tokens / 1024),
            _ => row.tokens.to_string(),
        };
        text(&mut out, (x(row.tokens), HEIGHT - BOTTOM + 18.0), "middle", "#333333", &label);
    }
    for (name, colour, pick) in ways {
        let points: Vec<(f64, f64)> =
            rows.iter().map(|row| (x(row.tokens), y(pick(&row.exposed)))).collect();
        line(&mut out, &points, colour, 2.0);
        for (cx, cy) in &points {
            _ = writeln!(out, "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        if let Some((at, height)) = points.last() {
            // Lines that end close together have their names above and below.
            let shift = if name == "following" { -4.0 } else { 12.0 };
            text(&mut out, (at + 8.0, height + shift), "start", colour, name);
        }
    }
    text(
        &mut out,
        (LEFT, 14.0),
        "start",
        "#333333",
        "exposed (ms): prefill's last token to decode's last byte",
    );
    let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
    text(&mut out, (middle, HEIGHT - 10.0), "middle", "#333333", "tokens of the prompt");
    out.push_str("</svg>\n");
    out
}

fn line(out: &mut String, points: &[(f64, f64)], colour: &str, width: f64) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    _ = writeln!(
        out,
        "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
    );
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, colour: &str, what: &str) {
    _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{what}</text>"
    );
}

/// The next number above that a person would choose.
fn nice(value: f64) -> f64 {
    let ten = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 4.0, 5.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * ten).find(|step| *step >= value).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_point_for_every_figure() {
        let ways =
            |ms: f64| Ways { sequential: ms, following: 20.0, by_layer: 5.0, unlimited: 3.0 };
        let row = |tokens: u64| Row {
            tokens,
            exposed: ways(tokens as f64),
            total: ways(1.0),
            ratio: 1.0,
            ratio_by_layer: 1.0,
        };
        let svg = svg(&[row(1000), row(1024), row(4096)]);
        assert_eq!(svg.matches("<circle").count(), 12);
        for label in [">1000<", ">1k<", ">4k<", ">5000<", ">sequential<", ">following<"] {
            assert!(svg.contains(label), "{label} in {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        let one = super::svg(&[row(1024)]);
        assert!(!one.contains("NaN") && !one.contains("inf"));
    }
}
