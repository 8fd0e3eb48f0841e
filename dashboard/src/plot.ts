// The charts' library with its style, in a file of its own: loaded when something is drawn.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export default uPlot;
