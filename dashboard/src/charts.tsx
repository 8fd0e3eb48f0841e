import { useEffect, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";
import { ask, type Figures } from "./api";
import { Fault, time, useLive } from "./parts";

const SPANS = [["60", "hour"], ["1440", "day"], ["10080", "week"]];

// What ended and how long it took, drawn when it is looked at.
export function Charts() {
  const [minutes, setMinutes] = useState("60");
  const { value, error } = useLive(() => ask<Figures>(`/v1/figures?minutes=${minutes}`), [minutes], undefined, 15);
  const total = (of: "completed" | "failed") => value?.steps.reduce((n, s) => n + s[of], 0) ?? 0;
  return (
    <section>
      <h2>Throughput and latency</h2>
      <p><label>The last <select value={minutes} onChange={(e) => setMinutes(e.currentTarget.value)}>
        {SPANS.map(([m, words]) => <option value={m}>{words}</option>)}
      </select></label></p>
      <Fault error={error} />
      {value && <>
        <p>{total("completed")} completed and {total("failed")} failed since {new Date(value.since).toLocaleString()}
          {!value.whole && "; before that, more than this looks at"}.</p>
        <div class="charts">
          <Chart label={`${total("completed")} completed and ${total("failed")} failed jobs over time`} at={value.steps.map((s) => s.at)} unit={String}
            lines={[["completed", "--good", value.steps.map((s) => s.completed)], ["failed", "--bad", value.steps.map((s) => s.failed)]]} />
          <Chart label="Seconds from creation to completion over time, median and 95th percentile" at={value.steps.map((s) => s.at)} unit={time}
            lines={[["p50", "--link", value.steps.map((s) => s.p50_seconds)], ["p95", "--busy", value.steps.map((s) => s.p95_seconds)]]} />
        </div>
      </>}
    </section>
  );
}

type Line = [name: string, color: string, values: (number | null)[]];

function Chart({ label, at, lines, unit }: { label: string; at: string[]; lines: Line[]; unit: (n: number) => string }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [fault, setFault] = useState<Error>();
  const data = [at.map((t) => Date.parse(t) / 1000), ...lines.map(([, , values]) => values)] as uPlot.AlignedData;
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    let over = false;
    const element = box.current!;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const size = () => ({ width: element.clientWidth, height: 200 });
    const draw = () => import("./plot").then(({ default: Plot }) => {
      if (over) return;
      plot.current?.destroy();
      const probe = document.createElement("i");
      element.append(probe);
      const color = (name: string) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
      const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
      plot.current = new Plot({
        ...size(),
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range: (_, __, most) => [0, Math.max(most ?? 0, 1)] } },
        axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map(unit) }],
        series: [{}, ...lines.map(([name, hue]) => ({
          label: name, stroke: color(hue), width: 2, spanGaps: false, points: { show: true, size: 4 },
          value: (_: uPlot, n: number | null) => n == null ? "–" : unit(n),
        }))],
      }, latest.current, element);
      probe.remove();
    }).catch(setFault);
    draw();
    const watch = new ResizeObserver(() => plot.current?.setSize(size()));
    watch.observe(element);
    dark.addEventListener("change", draw);
    return () => { over = true; watch.disconnect(); dark.removeEventListener("change", draw); plot.current?.destroy(); plot.current = null; };
  }, []);
  useEffect(() => { plot.current?.setData(data); }, [at[0], at[at.length - 1], JSON.stringify(lines)]);
  return <figure role="img" aria-label={label}><div ref={box} class="chart" /><Fault error={fault} /></figure>;
}
