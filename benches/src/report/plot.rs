//! Plots as SVG: dark on white whatever the page's colours are, and the legend beside the plot, where it hides nothing.

use std::{ops::Range, path::Path};

use plotters::{
    coord::{
        Shift,
        ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter},
    },
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Kind, Plot, Scale, Series};
use crate::Failure;

const SIZE: (u32, u32) = (860, 420);
const LEGEND: u32 = 150;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(222, 222, 222);

/// Colours that people tell apart who do not see all of them, after Okabe and Ito.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
];

/// The set-ups look the same in all plots.
const KNOWN: [(&str, usize); 5] = [
    ("bare", 6),
    ("guard", 1),
    ("layer", 2),
    ("wrapped", 0),
    ("abortable", 3),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Ruler, Ruler>>;

/// An axis with its ticks. It ends at ticks.
#[derive(Debug, Clone, PartialEq)]
struct Ruler {
    range: Range<f64>,
    ticks: Vec<f64>,
    scale: Scale,
}

// === impl Plot ===

impl Plot {
    /// Draws it into a file.
    pub fn draw(&self, file: &Path) -> Result<(), Failure> {
        let root = SVGBackend::new(file, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(SIZE.0 - LEGEND);
        match &self.kind {
            Kind::Lines => self.lines(&left)?,
            Kind::Bars { categories } => self.bars(&left, categories)?,
        }
        self.legend(&legend)?;
        root.present()?;
        Ok(())
    }

    fn lines(&self, area: &Area<'_>) -> Result<(), Failure> {
        let xs = self
            .series
            .iter()
            .flat_map(|series| series.points.iter().map(|point| point.0));
        let x = Ruler::around(xs, self.x.scale);
        let y = self.ruler_of_y(f64::MAX);
        let mut chart = self.chart(area, x, y)?;
        for (index, series) in self.series.iter().enumerate() {
            let colour = colour(series, index);
            let points = series.points.iter().copied();
            let marks = points
                .clone()
                .map(|point| Circle::new(point, 4, colour.filled()));
            chart.draw_series(marks)?;
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        }
        Ok(())
    }

    fn bars(&self, area: &Area<'_>, categories: &[String]) -> Result<(), Failure> {
        let x = Ruler {
            range: -0.5..categories.len() as f64 - 0.5,
            ticks: Vec::new(),
            scale: Scale::Linear,
        };
        let y = self.ruler_of_y(0.0);
        let bottom = y.range.start;
        let floor = if y.scale == Scale::Linear {
            0.0
        } else {
            bottom
        };
        let mut chart = self.chart(area, x, y)?;
        let width = 0.8 / self.series.len().max(1) as f64;
        for (index, series) in self.series.iter().enumerate() {
            let colour = colour(series, index);
            let bars = series.points.iter().map(|(category, figure)| {
                let left = category - 0.4 + index as f64 * width;
                Rectangle::new(
                    [(left + width * 0.06, floor), (left + width * 0.94, *figure)],
                    colour.filled(),
                )
            });
            chart.draw_series(bars)?;
        }
        let style = (FONT, 13)
            .into_font()
            .color(&INK)
            .pos(Pos::new(HPos::Center, VPos::Top));
        for (index, category) in categories.iter().enumerate() {
            let (across, down) = chart
                .plotting_area()
                .map_coordinate(&(index as f64, bottom));
            // The coordinates are those of the whole drawing, the area begins at its corner.
            area.draw(&Text::new(
                category.clone(),
                (across, down + 8),
                style.clone(),
            ))?;
        }
        Ok(())
    }

    /// Title, axes and grid.
    fn chart<'a, 'b>(
        &self,
        area: &'a Area<'b>,
        x: Ruler,
        y: Ruler,
    ) -> Result<Chart<'a, 'b>, Failure> {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 17).into_font().color(&INK))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, 13).into_font().color(&INK))
            .axis_desc_style((FONT, 14).into_font().color(&INK))
            .x_desc(&*self.x.label)
            .y_desc(&*self.y.label)
            .draw()?;
        Ok(chart)
    }

    /// Of all figures, and of `floor` if bars stand on it.
    fn ruler_of_y(&self, floor: f64) -> Ruler {
        let ys = self
            .series
            .iter()
            .flat_map(|series| series.points.iter().map(|point| point.1));
        let floor = (floor < f64::MAX && self.y.scale == Scale::Linear).then_some(floor);
        Ruler::around(ys.chain(floor), self.y.scale)
    }

    fn legend(&self, area: &Area<'_>) -> Result<(), Failure> {
        let style = (FONT, 14)
            .into_font()
            .color(&INK)
            .pos(Pos::new(HPos::Left, VPos::Center));
        for (index, series) in self.series.iter().enumerate() {
            let middle = 60 + 24 * index as i32;
            let square = [(4, middle - 6), (16, middle + 6)];
            area.draw(&Rectangle::new(square, colour(series, index).filled()))?;
            area.draw(&Text::new(series.name.clone(), (24, middle), style.clone()))?;
        }
        Ok(())
    }
}

fn colour(series: &Series, index: usize) -> RGBColor {
    let known = KNOWN.iter().find(|(name, _)| *name == series.name);
    COLOURS[known.map_or(index, |(_, index)| *index) % COLOURS.len()]
}

// === impl Ruler ===

impl Ruler {
    fn around(figures: impl Iterator<Item = f64>, scale: Scale) -> Self {
        let shown = |figure: &f64| figure.is_finite() && (scale == Scale::Linear || *figure > 0.0);
        let (mut from, mut to) = (f64::MAX, f64::MIN);
        for figure in figures.filter(shown) {
            from = from.min(figure);
            to = to.max(figure);
        }
        if from > to {
            (from, to) = (1.0, 10.0);
        }
        let ticks = match scale {
            Scale::Linear => round(from, to),
            Scale::Logarithmic => powers(from, to),
        };
        let range = ticks[0]..ticks[ticks.len() - 1];
        Self {
            range,
            ticks,
            scale,
        }
    }

    /// How far along the axis a figure is.
    fn share(&self, figure: f64) -> f64 {
        let Range { start, end } = self.range;
        match self.scale {
            Scale::Linear => (figure - start) / (end - start),
            Scale::Logarithmic => (figure.max(start) / start).ln() / (end / start).ln(),
        }
    }
}

/// About six round figures.
fn round(from: f64, to: f64) -> Vec<f64> {
    let span = if to > from {
        to - from
    } else {
        to.abs().max(1.0)
    };
    let rough = span / 6.0;
    let power = 10_f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let step = steps
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power);
    let first = (from / step).floor();
    let last = (to / step).ceil().max(first + 1.0);
    let count = (last - first) as usize;
    (0..=count)
        .map(|tick| (first + tick as f64) * step)
        .collect()
}

/// Powers of ten.
fn powers(from: f64, to: f64) -> Vec<f64> {
    let first = from.log10().floor() as i32;
    let last = (to.log10().ceil() as i32).max(first + 1);
    (first..=last).map(|power| 10_f64.powi(power)).collect()
}

impl Ranged for Ruler {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, figure: &f64, (first, last): (i32, i32)) -> i32 {
        first + (self.share(*figure) * f64::from(last - first)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.ticks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Ruler {
    fn format(figure: &f64) -> String {
        let (figure, unit) = match figure.abs() {
            1e9.. => (figure / 1e9, " G"),
            1e6.. => (figure / 1e6, " M"),
            1e4.. => (figure / 1e3, " k"),
            _ => (*figure, ""),
        };
        // Ten digits hide what sums of steps are off.
        let digits = format!("{figure:.10}");
        format!(
            "{}{unit}",
            digits.trim_end_matches('0').trim_end_matches('.')
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::section, *};

    #[test]
    fn a_linear_axis_has_round_ticks_around_all_figures() {
        let ruler = Ruler::around([0.0, 21.7, 13.0].into_iter(), Scale::Linear);
        assert_eq!(ruler.ticks, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]);
    }

    #[test]
    fn figures_below_zero_are_on_the_axis() {
        let ruler = Ruler::around([-0.3, 4.0].into_iter(), Scale::Linear);
        assert!(ruler.range.start <= -0.3 && ruler.range.end >= 4.0);
    }

    #[test]
    fn a_logarithmic_axis_has_the_powers_of_ten_at_equal_distances() {
        let ruler = Ruler::around([0.0, 20.0, 900.0].into_iter(), Scale::Logarithmic);
        assert_eq!(ruler.ticks, [10.0, 100.0, 1_000.0]);
        let places = [10.0, 100.0, 1_000.0].map(|figure| ruler.map(&figure, (0, 100)));
        assert_eq!(places, [0, 50, 100]);
    }

    #[test]
    fn large_figures_have_units() {
        let figures = [0.5, 5_000.0, 1e4, 2.5e6];
        let labels = ["0.5", "5000", "10 k", "2.5 M"];
        assert_eq!(figures.map(|figure| Ruler::format(&figure)), labels);
    }

    #[test]
    fn nothing_but_zeros_can_be_drawn() {
        for scale in [Scale::Linear, Scale::Logarithmic] {
            let ruler = Ruler::around([0.0, 0.0].into_iter(), scale);
            assert!(ruler.range.start < ruler.range.end);
        }
    }

    #[test]
    fn a_drawing_has_its_title_labels_and_series() {
        let mut plot = section().plots.remove(0);
        let file = std::env::temp_dir().join(format!("plot-{}.svg", std::process::id()));
        for kind in [
            Kind::Lines,
            Kind::Bars {
                categories: vec!["small".to_owned(), "large".to_owned()],
            },
        ] {
            let bars = matches!(kind, Kind::Bars { .. });
            plot.kind = kind;
            plot.draw(&file).unwrap();
            let svg = std::fs::read_to_string(&file).unwrap();
            for text in ["A plot", "an x", "a y", "bare", "wrapped"] {
                assert!(svg.contains(text), "{text:?} is not in:\n{svg}");
            }
            assert_eq!(svg.contains("small") && svg.contains("large"), bars);
        }
        std::fs::remove_file(&file).unwrap();
    }
}
