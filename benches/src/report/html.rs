//! Writes the report as an HTML page: one file without scripts.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::data::{Document, Series};
use super::peers::{self, Peer};
use super::{Experiment, Plot};
use crate::stats::{Rounds, Spread};

/// The appearance of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) colour: RGBColor,
    /// Length of a dash in pixels; 0 for a line without gaps.
    dash: i32,
    marker: Marker,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Marker {
    None,
    Circle,
    Triangle,
    Cross,
}

/// The appearance of a peer, which is the same in all plots. The colours are those of Okabe and
/// Ito's palette, which colour-blind readers can distinguish, with a matching grey. Variants of a
/// peer (`lvs-nat lc`) differ in lightness, dashes and markers.
pub(super) fn look(peer: &str) -> Look {
    let (of, variant) = peer.split_once(' ').unwrap_or((peer, ""));
    let colour = match of {
        "direct" => RGBColor(0, 0, 0),
        "routing" => RGBColor(153, 153, 153),
        "lvs-nat" => RGBColor(0, 114, 178),
        "lvs-dr" => RGBColor(0, 158, 115),
        "lvs-tunnel" => RGBColor(240, 228, 66),
        "lvs-nat-fast-path" => RGBColor(86, 180, 233),
        "nftables" => RGBColor(230, 159, 0),
        "haproxy" => RGBColor(213, 94, 0),
        // The palette has no colour left: this brown differs about equally from all its colours.
        "ip_vs" => RGBColor(102, 51, 17),
        _ => RGBColor(204, 121, 167),
    };
    let (dash, marker, light) = match variant {
        "rr" | "drop" | "one" | "nat" => (0, Marker::Circle, 1.0),
        "wrr" | "evict" | "two" | "routed" => (8, Marker::Triangle, 1.5),
        "lc" | "drop_entry" | "gateway" => (0, Marker::Triangle, 0.45),
        "dr" => (8, Marker::Triangle, 1.4),
        "tunnel" => (3, Marker::Cross, 1.4),
        "wlc" | "limit" => (3, Marker::Cross, 0.45),
        "drop_packet" => (8, Marker::Cross, 1.5),
        "secure_tcp" => (8, Marker::Circle, 0.45),
        "source-limit" => (3, Marker::Circle, 1.4),
        _ => (0, Marker::None, 1.0),
    };
    Look {
        colour: shade(colour, light),
        dash,
        marker,
    }
}

/// Changes the lightness of a colour: below 1 darker, above 1 lighter, at 2 white.
fn shade(colour: RGBColor, light: f64) -> RGBColor {
    let one = |part: u8| {
        let part = f64::from(part);
        let shaded = if light <= 1.0 {
            part * light
        } else {
            part + (255.0 - part) * (light - 1.0)
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 255"
        )]
        let shaded = shaded.round() as u8;
        shaded
    };
    RGBColor(one(colour.0), one(colour.1), one(colour.2))
}

/// Removes the positions of bars without a value. Returns the series at the new positions, and the
/// labels of the remaining bars.
fn close_up<'a>(series: &[Series], bars: &[&'a str]) -> (Vec<Series>, Vec<&'a str>) {
    let mut series = series.to_vec();
    if bars.is_empty() {
        return (series, Vec::new());
    }
    let has = |place: &usize| {
        let mut points = series.iter().flat_map(|one| &one.points);
        points.any(|(x, _)| x.total_cmp(&at(*place)).is_eq())
    };
    let places: Vec<usize> = (0..bars.len()).filter(has).collect();
    for (x, _) in series.iter_mut().flat_map(|one| &mut one.points) {
        let place = places.iter().position(|old| at(*old).total_cmp(x).is_eq());
        *x = place.map_or(*x, at);
    }
    (
        series,
        places.into_iter().map(|place| bars[place]).collect(),
    )
}

/// Draws a plot as an SVG image; `None` without data.
pub(super) fn plot(plot: &Plot, series: &[Series], bars: &[&str]) -> Result<Option<String>> {
    let (series, bars) = &close_up(series, bars);
    let points = || series.iter().flat_map(|series| &series.points);
    let xs = points().map(|(x, _)| *x);
    let (left, right) = xs.fold((f64::MAX, 0.0_f64), |(low, high), x| {
        (low.min(x), high.max(x))
    });
    let ys = points().map(|(_, y)| (y.min, y.max));
    let (low, high) = ys.fold((f64::MAX, 0.0_f64), |(low, high), y| {
        (low.min(y.0), high.max(y.1))
    });
    if series.is_empty() {
        return Ok(None);
    }
    let mut svg = String::new();
    // Room for a legend above the bars.
    let above = if bars.is_empty() { 1.25 } else { 1.6 };
    let (x, y) = ((left, right * 1.1), (low * 0.8, high * above));
    let (linear_x, linear_y) = (0.0..x.1, 0.0..y.1);
    let (log_x, log_y) = (powers(x).log_scale(), powers(y).log_scale());
    match (plot.x.log, plot.y.log) {
        (_, log) if !bars.is_empty() => {
            let x = -0.6..at(bars.len()) - 0.4;
            match log {
                true => draw(&mut svg, plot, series, bars, x, log_y),
                false => draw(&mut svg, plot, series, bars, x, linear_y),
            }
        }
        (true, true) => draw(&mut svg, plot, series, bars, log_x, log_y),
        (true, false) => draw(&mut svg, plot, series, bars, log_x, linear_y),
        (false, true) => draw(&mut svg, plot, series, bars, linear_x, log_y),
        (false, false) => draw(&mut svg, plot, series, bars, linear_x, linear_y),
    }
    .map_err(|error| anyhow!("cannot draw {}: {error}", plot.name))?;
    // The plot scales with the page.
    Ok(Some(svg.replacen(
        "<svg width=\"860\" height=\"480\"",
        "<svg role=\"img\"",
        1,
    )))
}

/// Returns the range of a logarithmic axis. A range of less than two powers of ten might contain no
/// labelled number, so it is extended to whole powers of ten.
fn powers((low, high): (f64, f64)) -> std::ops::Range<f64> {
    if high >= low * 100.0 {
        return low..high;
    }
    let power = |of: f64| 10_f64.powf(of);
    power(low.log10().floor())..power((high.log10() - 1e-9).ceil())
}

fn draw<X, Y>(
    svg: &mut String,
    plot: &Plot,
    series: &[Series],
    bars: &[&str],
    x: X,
    y: Y,
) -> Result<(), Box<dyn std::error::Error>>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let area = SVGBackend::with_string(svg, (860, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let names = if bars.is_empty() { 48 } else { 120 };
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .caption(plot.title, ("sans-serif", 20))
        .x_label_area_size(names)
        .y_label_area_size(76)
        .build_cartesian_2d(x, y)?;
    let lowest = chart.y_range().start;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(RGBColor(240, 240, 240))
        .max_light_lines(2)
        .x_desc(axis(&plot.x))
        .y_desc(axis(&plot.y))
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15));
    if !bars.is_empty() {
        mesh.disable_x_mesh().x_labels(0);
    }
    mesh.draw()?;
    let mut named: Vec<&str> = Vec::new();
    for one in series {
        // Bars have their own names below, so the legend names their peers.
        let of = one.peer.split(' ').next().unwrap_or_default();
        let peer = if bars.is_empty() { &one.peer } else { of };
        let Look {
            colour,
            dash,
            marker,
        } = look(peer);
        // A single point makes no line, so it needs a marker.
        let marker = match (one.points.len(), marker) {
            (1, Marker::None) => Marker::Circle,
            _ => marker,
        };
        let style = colour.stroke_width(2);
        let points = one.points.iter().map(|(x, y)| (*x, y.median));
        if !bars.is_empty() {
            let fill = colour.filled();
            let drawn = chart.draw_series(one.points.iter().map(|(x, y)| {
                let (middle, half) = stands(series, one, *x);
                Rectangle::new([(middle - half, lowest), (middle + half, y.median)], fill)
            }))?;
            if !named.contains(&of) {
                named.push(of);
                drawn
                    .label(of)
                    .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 18, y + 5)], fill));
            }
            let nothing = one.points.iter().filter(|(_, y)| y.max <= 0.0);
            let nothing = nothing.map(|(x, _)| (stands(series, one, *x).0, lowest));
            for at in nothing {
                let (x, y) = chart.backend_coord(&at);
                area.draw(&Cross::new((x, y - 8), 4, style))?;
            }
        } else {
            let size = move |of: Marker| if marker == of { 4 } else { 0 };
            let key = move |(x, y): (i32, i32)| {
                let end = match dash {
                    0 => x + 18,
                    dash => x + dash.max(6),
                };
                EmptyElement::at((x, y))
                    + PathElement::new(vec![(0, 0), (end - x, 0)], style)
                    + PathElement::new(vec![(18 - (end - x), 0), (18, 0)], style)
                    + Circle::new((9, 0), size(Marker::Circle), colour.filled())
                    + TriangleMarker::new((9, 0), size(Marker::Triangle), colour.filled())
                    + Cross::new((9, 0), size(Marker::Cross), style)
            };
            let line = points.clone();
            let drawn = match dash {
                0 => chart.draw_series(LineSeries::new(line, style))?,
                dash => chart.draw_series(DashedLineSeries::new(line, dash, dash, style))?,
            };
            drawn.label(&one.peer).legend(key);
            match marker {
                Marker::None => {}
                Marker::Circle => {
                    chart.draw_series(points.map(|at| Circle::new(at, 4, colour.filled())))?;
                }
                Marker::Triangle => {
                    chart.draw_series(
                        points.map(|at| TriangleMarker::new(at, 5, colour.filled())),
                    )?;
                }
                Marker::Cross => {
                    chart.draw_series(points.map(|at| Cross::new(at, 4, style)))?;
                }
            }
        }
        let spread = if bars.is_empty() { colour } else { BLACK };
        // A bar of 0 has a cross instead of whiskers.
        let whiskers = one
            .points
            .iter()
            .filter(|(_, y)| bars.is_empty() || y.max > 0.0);
        chart.draw_series(whiskers.map(|(x, y)| {
            let x = match bars.is_empty() {
                true => *x,
                false => stands(series, one, *x).0,
            };
            ErrorBar::new_vertical(x, y.min, y.median, y.max, spread.filled(), 5)
        }))?;
    }
    // Lines usually start low, so the legend fits; bars need additional space at the right.
    chart
        .configure_series_labels()
        .position(if bars.is_empty() {
            SeriesLabelPosition::UpperLeft
        } else {
            SeriesLabelPosition::UpperRight
        })
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(160, 160, 160))
        .label_font(("sans-serif", 13))
        .draw()?;
    for (place, name) in bars.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(at(place), lowest));
        let turned = ("sans-serif", 13)
            .into_font()
            .transform(FontTransform::Rotate270)
            .color(&BLACK)
            .pos(Pos::new(HPos::Right, VPos::Center));
        area.draw(&Text::new((*name).to_owned(), (x, y + 6), turned))?;
    }
    area.present()?;
    Ok(())
}

/// The middle of the bar of series `of` among the bars at the same x, and half of the bar's width.
fn stands(series: &[Series], of: &Series, x: f64) -> (f64, f64) {
    let has = |one: &&Series| one.points.iter().any(|(own, _)| own.total_cmp(&x).is_eq());
    let all = series.iter().filter(has).count().max(1);
    let before = series.iter().take_while(|one| one.peer != of.peer);
    let half = 0.4 / at(all).max(1.25);
    let place = at(before.filter(has).count());
    (x + half * (2.0 * place + 1.0 - at(all)), half)
}

/// The position of the bar with number `place`.
fn at(place: usize) -> f64 {
    u32::try_from(place).map_or(f64::MAX, f64::from)
}

fn axis(axis: &super::Axis) -> String {
    format!("{} ({})", axis.name, axis.unit)
}

/// Shortens a number: `4096` becomes `4.1k`.
fn short(value: f64) -> String {
    if (0.0..1.0).contains(&value) {
        // No more digits than the value has.
        return format!("{:.3}", value)
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned();
    }
    let (scaled, suffix) = match value {
        value if value >= 1e9 => (value / 1e9, "G"),
        value if value >= 1e6 => (value / 1e6, "M"),
        value if value >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = if scaled >= 10.0 {
        format!("{scaled:.0}")
    } else {
        format!("{scaled:.1}")
    };
    text.trim_end_matches(".0").to_owned() + suffix
}

const STYLE: &str = "
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem;color:#111;background:#fff}
svg{width:100%;height:auto}figure{margin:1rem 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{border-bottom:1px solid #ccc;padding:.2rem .6rem;text-align:right}th:first-child,td:first-child{text-align:left}
.note{border-left:4px solid #d55e00;padding-left:.8rem}
@media(max-width:40rem){body{padding:.5rem;font-size:15px}figure{overflow-x:auto}svg{min-width:36rem}}
@media print{body{max-width:none;font-size:10pt}figure,tr{break-inside:avoid}.wide{overflow:visible}}
";

pub(super) fn page(document: &Document, experiments: &[&dyn Experiment]) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>LVS in userspace: report</title><style>{STYLE}</style></head><body><h1>Published LVS experiments, repeated</h1>\n"
    );
    let quick = if document.quick { ", --quick" } else { "" };
    writeln!(
        page,
        "<p>Lines are medians of up to {}{quick}; bars go from the least to the greatest. In a round each peer is measured once.</p>",
        Rounds(document.rounds)
    )?;
    if !document.complete {
        page +=
            "<p class=\"note\">This run was interrupted; <code>--resume</code> continues it.</p>\n";
    }
    if document.busy {
        page += "<p class=\"note\">Measured on a busy machine: the figures are unreliable.</p>\n";
    }
    page.push_str("<nav><ul>");
    for experiment in experiments {
        let title = escape(experiment.title());
        write!(
            page,
            "<li><a href=\"#{}\">{title}</a></li>",
            experiment.name()
        )?;
    }
    page.push_str("<li><a href=\"#machine\">Machine</a></li></ul></nav>\n");
    for experiment in experiments {
        section(&mut page, document, *experiment)?;
    }
    page += "<h2 id=\"machine\">Machine</h2><div class=\"wide\"><table><tr><th>what</th><th>value</th></tr>";
    for (name, value) in &document.machine {
        write!(
            page,
            "<tr><td>{}</td><td>{}</td></tr>",
            escape(name),
            escape(value)
        )?;
    }
    page += "</table></div></body></html>\n";
    Ok(page)
}

fn section(page: &mut String, document: &Document, experiment: &dyn Experiment) -> Result<()> {
    let name = experiment.name();
    let peers = peers::of(experiment);
    writeln!(
        page,
        "<h2 id=\"{name}\">{}</h2><p>{}</p>",
        escape(experiment.title()),
        escape(experiment.what())
    )?;
    let sentences = experiment.conclusions(document);
    if sentences.is_empty() {
        page.push_str("<p>There are too few measurements for conclusions.</p>\n");
    } else {
        list(page, &sentences)?;
    }
    let mut not_drawn = Vec::new();
    for one in experiment.plots() {
        let series = experiment.series(document, one);
        let bars = experiment.bars(one);
        if let Some(svg) = plot(one, &series, bars)? {
            writeln!(page, "<figure id=\"{name}-{}\">{svg}</figure>", one.name)?;
            table(page, one, &series, bars)?;
        } else {
            not_drawn.push(one.title);
        }
    }
    page.push_str(
        "<h3>CPU seconds a second</h3><div class=\"wide\"><table><tr><th>peer</th><th>director, process</th>\
         <th>director, softirq threads</th><th>other softirq threads</th><th>clients and servers</th><th>runs</th><th>disturbed</th></tr>",
    );
    for peer in &peers {
        let runs: Vec<_> = document.of(name, peer).collect();
        let median = |of: fn(&super::data::CpuSeconds) -> f64| {
            let shares = runs
                .iter()
                .map(|run| of(&run.cpu) / run.cpu.elapsed.max(1e-9));
            Spread::of(shares).map_or(0.0, |spread| spread.median)
        };
        if !runs.is_empty() {
            let disturbed = runs.iter().filter(|run| run.disturbed.is_some()).count();
            write!(
                page,
                "<tr><td>{peer}</td><td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{}</td><td>{disturbed}</td></tr>",
                median(|cpu| cpu.process),
                median(|cpu| cpu.softirq),
                median(|cpu| cpu.other_softirq),
                median(|cpu| cpu.endpoints),
                runs.len()
            )?;
        }
    }
    page.push_str("</table></div>\n");
    notes(page, document, name)?;
    page.push_str("<h3>Not measured</h3>");
    list(page, &not_measured(document, experiment, &not_drawn))
}

/// Sentences about the peers and plots that have no figures in an experiment, with the reasons.
/// `plots`: the titles of the plots without figures.
fn not_measured(document: &Document, experiment: &dyn Experiment, plots: &[&str]) -> Vec<String> {
    let name = experiment.name();
    let missing = document.missing.iter();
    let missing: Vec<_> = missing.filter(|one| one.experiment == name).collect();
    let mut sentences: Vec<String> = missing
        .iter()
        .map(|one| format!("{}: {}", one.peer, one.why))
        .collect();
    for (why, quick) in [("left out with --quick", true), ("not requested", false)] {
        let is_named = |peer: &Peer| {
            missing.iter().any(|one| one.peer == peer.name)
                || document.of(name, peer.name).next().is_some()
                || quick != (document.quick && !experiment.is_quick(peer))
        };
        let others = experiment.peers().iter().filter(|peer| !is_named(peer));
        let others: Vec<_> = others.map(|peer| peer.name).collect();
        if !others.is_empty() {
            sentences.push(format!("{}: {why}", others.join(", ")));
        }
    }
    let quick = if document.quick { " with --quick" } else { "" };
    let plots = plots.iter();
    sentences.extend(plots.map(|title| format!("“{title}”: no figures{quick}")));
    if sentences.is_empty() {
        sentences.push("nothing is missing: all peers and plots have figures".to_owned());
    }
    sentences
}

fn list(page: &mut String, items: &[String]) -> Result<()> {
    page.push_str("<ul>");
    for item in items {
        write!(page, "<li>{}</li>", escape(item))?;
    }
    page.push_str("</ul>\n");
    Ok(())
}

/// Writes the notes of an experiment's runs, each with the number of rounds that have it.
fn notes(page: &mut String, document: &Document, experiment: &str) -> Result<()> {
    let mut sentences: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let runs = document.runs.iter();
    for run in runs.filter(|run| run.experiment == experiment) {
        for note in &run.notes {
            *sentences.entry((&run.peer, note)).or_default() += 1;
        }
    }
    if sentences.is_empty() {
        return Ok(());
    }
    page.push_str("<h3>Notes</h3><ul>");
    for ((peer, note), rounds) in sentences {
        write!(
            page,
            "<li>{}: {} ({})</li>",
            escape(peer),
            escape(note),
            Rounds(rounds)
        )?;
    }
    page.push_str("</ul>\n");
    Ok(())
}

fn table(page: &mut String, plot: &Plot, series: &[Series], bars: &[&str]) -> Result<()> {
    write!(
        page,
        "<details><summary>{} as a table, {}</summary><div class=\"wide\"><table><tr><th>{}</th>",
        plot.title, plot.y.unit, plot.x.unit
    )?;
    for one in series {
        write!(page, "<th>{}</th>", escape(&one.peer))?;
    }
    page.push_str("</tr>");
    let mut xs: Vec<f64> = series
        .iter()
        .flat_map(|one| &one.points)
        .map(|(x, _)| *x)
        .collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    for x in xs {
        let name = bars
            .iter()
            .enumerate()
            .find(|(place, _)| at(*place).total_cmp(&x).is_eq());
        match name {
            Some((_, name)) => write!(page, "<tr><td>{}</td>", escape(name))?,
            None => write!(page, "<tr><td>{x}</td>")?,
        }
        for one in series {
            match one.points.iter().find(|(own, _)| own.total_cmp(&x).is_eq()) {
                Some((_, y)) => {
                    write!(page, "<td>{:.1} ({:.1}-{:.1})</td>", y.median, y.min, y.max)?;
                }
                None => page.push_str("<td></td>"),
            }
        }
        page.push_str("</tr>");
    }
    page.push_str("</table></div></details>\n");
    Ok(())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_logarithmic_axis_begins_and_ends_with_a_label() {
        let near = |range: std::ops::Range<f64>, low: f64, high: f64| {
            (range.start / low - 1.0).abs() < 1e-6 && (range.end / high - 1.0).abs() < 1e-6
        };
        assert!(near(powers((22.0, 41.0)), 10.0, 100.0));
        assert!(near(powers((64.0, 70.4)), 10.0, 100.0));
        assert!(near(powers((1.0, 70.4)), 1.0, 100.0));
        assert!(near(powers((0.3, 5000.0)), 0.3, 5000.0));
        // The range is never empty.
        assert!(near(powers((10.0, 10.0 * 1.1)), 10.0, 100.0));
        assert!(near(powers((80.0, 100.0)), 10.0, 100.0));
    }
}
