//! Plots as SVG, dark on white in every colour scheme. The legend is beside the plot, so it hides nothing.

use std::{ops::Range, path::Path};

use anyhow::Result;
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Axis, Plot, Series};

const SIZE: (u32, u32) = (860, 420);
const LEGEND: u32 = 150;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(222, 222, 222);

/// Colours that are distinguishable with colour blindness, after Okabe and Ito. Each named set-up has the same colour
/// in all plots.
const COLOURS: [(&str, RGBColor); 8] = [
    ("wrapped", RGBColor(0, 114, 178)),
    ("guard", RGBColor(230, 159, 0)),
    ("layer", RGBColor(0, 158, 115)),
    ("abortable", RGBColor(204, 121, 167)),
    ("", RGBColor(213, 94, 0)),
    ("", RGBColor(86, 180, 233)),
    ("bare", RGBColor(120, 120, 120)),
    ("", RGBColor(0, 0, 0)),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

// === impl Plot ===

impl Plot {
    /// Draws the plot into a file.
    pub fn draw(&self, file: &Path) -> Result<()> {
        let root = SVGBackend::new(file, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(SIZE.0 - LEGEND);
        self.figures(&left)?;
        self.legend(&legend)?;
        Ok(root.present()?)
    }

    fn figures(&self, area: &Area<'_>) -> Result<()> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let ys = points().map(|point| point.1);
        let bars = self.categories.len();
        let (x, y) = match bars {
            0 => (
                self.x.range(points().map(|point| point.0)),
                self.y.range(ys),
            ),
            _ => (-0.5..bars as f64 - 0.5, self.y.range(ys.chain([0.0]))),
        };
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 17).into_font().color(&INK))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x.clone(), y.clone())?;
        let x_label = |x: &f64| match bars {
            0 => self.x.figure_at(*x),
            _ => self.category_at(*x),
        };
        let y_label = |y: &f64| self.y.figure_at(*y);
        let mut mesh = chart.configure_mesh();
        if bars > 0 {
            mesh.disable_x_mesh();
        }
        mesh.light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, 13).into_font().color(&INK))
            .axis_desc_style((FONT, 14).into_font().color(&INK))
            .x_labels(self.x.labels(&x).max(bars + 1))
            .y_labels(self.y.labels(&y))
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .x_desc(self.x.label())
            .y_desc(self.y.label())
            .draw()?;
        // The base line of the bars.
        let floor = match self.y {
            Axis::Linear(_) => 0.0,
            Axis::Logarithmic(_) => y.start,
        };
        let width = 0.8 / self.series.len().max(1) as f64;
        for (index, series) in self.series.iter().enumerate() {
            let colour = series.colour(index);
            let points = series.points.iter();
            let points = points.map(|(x, y)| (self.x.place(*x), self.y.place(*y)));
            if bars > 0 {
                chart.draw_series(points.map(|(category, top)| {
                    let left = category - 0.4 + (index as f64 + 0.06) * width;
                    let corner = (left + width * 0.88, top.max(y.start));
                    Rectangle::new([(left, floor), corner], colour.filled())
                }))?;
            } else {
                let points = points.filter(|(x, y)| x.is_finite() && y.is_finite());
                let mark = |point| Circle::new(point, 4, colour.filled());
                chart.draw_series(points.clone().map(mark))?;
                chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
            }
        }
        Ok(())
    }

    /// The category whose bars have their middle at `x`, or an empty label.
    fn category_at(&self, x: f64) -> String {
        let category = self.categories.get(x.round() as usize);
        let is_middle = (x - x.round()).abs() < 0.01;
        category.filter(|_| is_middle).cloned().unwrap_or_default()
    }

    fn legend(&self, area: &Area<'_>) -> Result<()> {
        let middle_left = Pos::new(HPos::Left, VPos::Center);
        let style = (FONT, 14).into_font().color(&INK).pos(middle_left);
        for (index, series) in self.series.iter().enumerate() {
            let middle = 60 + 24 * index as i32;
            let square = [(4, middle - 6), (16, middle + 6)];
            area.draw(&Rectangle::new(square, series.colour(index).filled()))?;
            area.draw(&Text::new(series.name.clone(), (24, middle), style.clone()))?;
        }
        Ok(())
    }
}

// === impl Series ===

impl Series {
    fn colour(&self, index: usize) -> RGBColor {
        let known = COLOURS.iter().find(|(name, _)| *name == self.name);
        known.unwrap_or(&COLOURS[index % COLOURS.len()]).1
    }
}

// === impl Axis ===

impl Axis {
    fn label(&self) -> &str {
        let (Self::Linear(label) | Self::Logarithmic(label)) = self;
        label
    }

    /// The position of a figure: its logarithm on a logarithmic axis.
    fn place(&self, figure: f64) -> f64 {
        match self {
            Self::Linear(_) => figure,
            Self::Logarithmic(_) => figure.log10(),
        }
    }

    /// The range of the axis: padded if linear, whole powers of ten if logarithmic.
    fn range(&self, figures: impl Iterator<Item = f64>) -> Range<f64> {
        let places = figures.map(|figure| self.place(figure));
        let places = Vec::from_iter(places.filter(|place| place.is_finite()));
        let from = places.iter().copied().fold(f64::MAX, f64::min);
        let to = places.iter().copied().fold(f64::MIN, f64::max);
        let room = if to > from { 0.05 * (to - from) } else { 1.0 };
        // Many series start at zero.
        let below = if from == 0.0 { 0.0 } else { room };
        match self {
            _ if from > to => 0.0..1.0,
            Self::Linear(_) => from - below..to + room,
            Self::Logarithmic(_) => from.floor()..to.ceil().max(from.floor() + 1.0),
        }
    }

    /// Approximate number of labels. A logarithmic axis has one for each power of ten.
    fn labels(&self, range: &Range<f64>) -> usize {
        match self {
            Self::Linear(_) => 8,
            Self::Logarithmic(_) => (range.end - range.start) as usize + 1,
        }
    }

    /// The label at a position.
    fn figure_at(&self, place: f64) -> String {
        let figure = match self {
            Self::Linear(_) => place,
            Self::Logarithmic(_) => 10_f64.powf(place),
        };
        let (figure, unit) = match figure.abs() {
            1e9.. => (figure / 1e9, " G"),
            1e6.. => (figure / 1e6, " M"),
            1e4.. => (figure / 1e3, " k"),
            _ => (figure, ""),
        };
        // Rounds away the error of summed steps.
        let digits = format!("{figure:.10}");
        let digits = digits.trim_end_matches('0').trim_end_matches('.');
        format!("{digits}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::section, *};

    #[test]
    fn all_figures_are_on_the_axis_and_zeros_can_be_drawn() {
        let axis = Axis::linear("");
        let range = axis.range([-0.3, 4.0].into_iter());
        assert!(range.start < -0.3 && range.end > 4.0);
        assert_eq!(axis.range([0.0, 4.0].into_iter()).start, 0.0);
        for axis in [axis, Axis::logarithmic("")] {
            assert!(!axis.range([0.0, 0.0].into_iter()).is_empty());
        }
    }

    #[test]
    fn labels_have_units_and_stand_at_powers_of_ten_on_a_logarithmic_axis() {
        let (linear, axis) = (Axis::linear(""), Axis::logarithmic(""));
        let range = axis.range([0.0, 20.0, 900.0].into_iter());
        assert_eq!((range.clone(), axis.labels(&range)), (1.0..3.0, 3));
        let labels = [1.0, 2.0, 3.0].map(|place| axis.figure_at(place));
        assert_eq!(labels, ["10", "100", "1000"]);
        let labels = [0.5, 5_000.0, 1e4, 2.5e6].map(|figure| linear.figure_at(figure));
        assert_eq!(labels, ["0.5", "5000", "10 k", "2.5 M"]);
    }

    #[test]
    fn a_drawing_has_its_title_labels_and_series() {
        let mut plot = section().plots.remove(0);
        let file = std::env::temp_dir().join(format!("plot-{}.svg", std::process::id()));
        for categories in [Vec::new(), vec!["small", "large"]] {
            let bars = !categories.is_empty();
            plot = plot.over(categories);
            plot.draw(&file).unwrap();
            let svg = std::fs::read_to_string(&file).unwrap();
            for text in ["A plot", "an x", "a y", "bare", "wrapped"] {
                assert!(svg.contains(text), "{text:?} is not in:\n{svg}");
            }
            for category in ["small", "large"] {
                assert_eq!(svg.matches(category).count(), usize::from(bars));
            }
        }
        std::fs::remove_file(&file).unwrap();
    }
}
