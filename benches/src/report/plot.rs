//! Plots as SVG: dark on white whatever the page's colours are, and the legend beside the plot, where it hides nothing.

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

/// Colours that people tell apart who do not see all of them, after Okabe and Ito. The set-ups, which are named here, look the
/// same in all plots.
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

// === impl Plot ===

impl Plot {
    /// Draws it into a file.
    pub fn draw(&self, file: &Path) -> Result<()> {
        let root = SVGBackend::new(file, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(SIZE.0 - LEGEND);
        self.figures(&left)?;
        self.legend(&legend)?;
        root.present()?;
        Ok(())
    }

    fn figures(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let ys = points().map(|point| point.1);
        let has_bars = !self.categories.is_empty();
        let (x, y) = if has_bars {
            let x = -0.5..self.categories.len() as f64 - 0.5;
            (x, self.y.range(ys.chain([0.0])))
        } else {
            let xs = points().map(|point| point.0);
            (self.x.range(xs), self.y.range(ys))
        };
        // Where bars stand.
        let floor = match self.y.is_logarithmic {
            true => y.start,
            false => 0.0,
        };
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 17).into_font().color(&INK))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x.clone(), y.clone())?;
        let x_label = |x: &f64| match has_bars {
            true => self.category_at(*x),
            false => self.x.figure_at(*x),
        };
        let y_label = |y: &f64| self.y.figure_at(*y);
        let mut mesh = chart.configure_mesh();
        if has_bars {
            mesh.disable_x_mesh();
        }
        mesh.light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, 13).into_font().color(&INK))
            .axis_desc_style((FONT, 14).into_font().color(&INK))
            .x_labels(self.x.labels(&x).max(self.categories.len() + 1))
            .y_labels(self.y.labels(&y))
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .x_desc(&*self.x.label)
            .y_desc(&*self.y.label)
            .draw()?;
        let width = 0.8 / self.series.len().max(1) as f64;
        for (index, series) in self.series.iter().enumerate() {
            let colour = series.colour(index);
            let points = series.points.iter();
            if has_bars {
                chart.draw_series(points.map(|(category, figure)| {
                    let left = category - 0.4 + (index as f64 + 0.06) * width;
                    let top = self.y.place(*figure).max(y.start);
                    Rectangle::new([(left, floor), (left + width * 0.88, top)], colour.filled())
                }))?;
            } else {
                let points = points.map(|(x, y)| (self.x.place(*x), self.y.place(*y)));
                let points = points.filter(|(x, y)| x.is_finite() && y.is_finite());
                let mark = |point| Circle::new(point, 4, colour.filled());
                chart.draw_series(points.clone().map(mark))?;
                chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
            }
        }
        Ok(())
    }

    /// The category in the middle of whose bars this is, if it is.
    fn category_at(&self, x: f64) -> String {
        let category = self.categories.get(x.round() as usize);
        let is_middle = (x - x.round()).abs() < 0.01;
        category.filter(|_| is_middle).cloned().unwrap_or_default()
    }

    fn legend(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
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
    /// Where a figure is: on a logarithmic axis, at its power of ten.
    fn place(&self, figure: f64) -> f64 {
        match self.is_logarithmic {
            true => figure.log10(),
            false => figure,
        }
    }

    /// From the first place to the last, and what it takes to whole powers of ten, or some room.
    fn range(&self, figures: impl Iterator<Item = f64>) -> Range<f64> {
        let places = figures.map(|figure| self.place(figure));
        let places = Vec::from_iter(places.filter(|place| place.is_finite()));
        let from = places.iter().copied().fold(f64::MAX, f64::min);
        let to = places.iter().copied().fold(f64::MIN, f64::max);
        if from > to {
            0.0..1.0
        } else if self.is_logarithmic {
            from.floor()..to.ceil().max(from.floor() + 1.0)
        } else {
            let room = if to > from { 0.05 * (to - from) } else { 1.0 };
            // Many figures begin with nothing.
            let below = if from == 0.0 { 0.0 } else { room };
            from - below..to + room
        }
    }

    /// About how many labels it has. All powers of ten have one.
    fn labels(&self, range: &Range<f64>) -> usize {
        match self.is_logarithmic {
            true => (range.end - range.start) as usize + 1,
            false => 8,
        }
    }

    /// What the label at a place says.
    fn figure_at(&self, place: f64) -> String {
        let figure = match self.is_logarithmic {
            true => 10_f64.powf(place),
            false => place,
        };
        let (figure, unit) = match figure.abs() {
            1e9.. => (figure / 1e9, " G"),
            1e6.. => (figure / 1e6, " M"),
            1e4.. => (figure / 1e3, " k"),
            _ => (figure, ""),
        };
        // Ten digits hide what sums of steps are off.
        let digits = format!("{figure:.10}");
        let digits = digits.trim_end_matches('0').trim_end_matches('.');
        format!("{digits}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::section, *};

    #[test]
    fn all_figures_are_on_the_axis() {
        let axis = Axis::linear("");
        let range = axis.range([-0.3, 4.0].into_iter());
        assert!(range.start < -0.3 && range.end > 4.0);
        assert_eq!(axis.range([0.0, 4.0].into_iter()).start, 0.0);
    }

    #[test]
    fn a_logarithmic_axis_has_the_powers_of_ten_at_equal_distances() {
        let axis = Axis::logarithmic("");
        let range = axis.range([0.0, 20.0, 900.0].into_iter());
        assert_eq!((range.clone(), axis.labels(&range)), (1.0..3.0, 3));
        let labels = [1.0, 2.0, 3.0].map(|place| axis.figure_at(place));
        assert_eq!(labels, ["10", "100", "1000"]);
    }

    #[test]
    fn large_figures_have_units() {
        let figures = [0.5, 5_000.0, 1e4, 2.5e6];
        let labels = ["0.5", "5000", "10 k", "2.5 M"];
        assert_eq!(
            figures.map(|figure| Axis::linear("").figure_at(figure)),
            labels
        );
    }

    #[test]
    fn nothing_but_zeros_can_be_drawn() {
        for axis in [Axis::linear(""), Axis::logarithmic("")] {
            let range = axis.range([0.0, 0.0].into_iter());
            assert!(range.start < range.end);
        }
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
