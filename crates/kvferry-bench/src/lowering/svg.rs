//! The rows as bars: one group for each, on a logarithmic scale.

use super::measure::Row;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 430.0;
const BAR: f64 = 9.0;
const GROUP: f64 = 5.0 * BAR;
const TOP: f64 = 50.0;
const WAYS: [(&str, &str); 4] =
    [("direct", "#8d99ae"), ("full read", "#b08968"), ("packed", "#2a9d8f"), ("chosen", "#1d3557")];

pub(super) fn draw(rows: &[Row]) -> String {
    let times = |row: &Row| {
        [Some(row.direct_ms), Some(row.full_read_ms), row.packed_ms, Some(row.chosen_ms)]
    };
    let all = || rows.iter().flat_map(times).flatten();
    let (least, most) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    // From the power of ten below the least to that above the most.
    let (low, high) = (least.log10().floor(), most.log10().ceil().max(least.log10().floor() + 1.0));
    let place = |ms: f64| LEFT + (ms.log10() - low) / (high - low) * (WIDTH - LEFT - 60.0);
    let height = TOP + rows.len() as f64 * GROUP + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n"
    );
    for (number, (name, colour)) in WAYS.iter().enumerate() {
        let x = LEFT + 100.0 * number as f64;
        out += &format!(
            "<rect x=\"{x}\" y=\"8\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" \
             y=\"17\">{name}</text>\n",
            x + 14.0
        );
    }
    let mut power = low;
    while power <= high {
        let x = place(10f64.powf(power));
        out += &format!(
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{height}\" stroke=\"#ddd\"/><text \
             x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{} ms</text>\n",
            TOP - 6.0,
            10f64.powf(power)
        );
        power += 1.0;
    }
    for (number, row) in rows.iter().enumerate() {
        let y = TOP + number as f64 * GROUP;
        let case = format!("{}: {}", row.transport, row.case).replace("->", "→");
        out += &format!(
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{case}</text>\n",
            LEFT - 8.0,
            y + GROUP / 2.0
        );
        for (bar, (ms, (_, colour))) in times(row).into_iter().zip(WAYS).enumerate() {
            let Some(ms) = ms else { continue };
            out += &format!(
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>\n",
                y + bar as f64 * BAR,
                place(ms) - LEFT,
                BAR - 1.0
            );
        }
    }
    out + "</svg>\n"
}
