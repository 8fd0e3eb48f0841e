import { useEffect, useState } from "preact/hooks";
import { Compare } from "./compare";
import { ask, make, type Media, type MediaItem, type Page, type Timeline } from "./api";
import { Player } from "./player";
import { Act, ago, Bar, Calls, Fault, go, Link, Segments, size, State, time, useLive, Why } from "./parts";

const STATES = ["", "queued", "processing", "ready", "failed", "expired", "awaiting_upload"];

export function Library() {
  const state = new URLSearchParams(location.search).get("state") ?? "";
  const [more, setMore] = useState<MediaItem[]>([]);
  const [cursor, setCursor] = useState<string | null>();
  const path = `/v1/media?limit=48${state ? `&state=${state}` : ""}`;
  const { value, error } = useLive(() => ask<Page<MediaItem>>(path), [path], {});
  useEffect(() => { setMore([]); setCursor(undefined); }, [path]);
  const next = cursor === undefined ? value?.next_cursor : cursor;
  const load = () => ask<Page<MediaItem>>(`${path}&cursor=${next}`).then((p) => { setMore([...more, ...p.data]); setCursor(p.next_cursor); });
  const shown = [...(value?.data ?? []), ...more];
  return (
    <main>
      <h1>Media</h1>
      <nav class="tabs" aria-label="States">
        {STATES.map((s) => <Link to={`/ui/media${s ? `?state=${s}` : ""}`} aria-current={s === state ? "page" : undefined}>{s.replace("_", " ") || "all"}</Link>)}
      </nav>
      <Fault error={error} />
      {value && !shown.length && <p>There is nothing here. <Link to="/ui/uploads">Upload a file.</Link></p>}
      <ul class="library">
        {shown.map((m) => (
          <li key={m.id}>
            <Link to={`/ui/media/${m.id}`}>
              <Thumb of={m} />
              <b>{m.filename ?? m.id}</b>
            </Link>
            <State of={m.state} /> <small>{size(m.size)} · {ago(m.created_at)}</small>
          </li>
        ))}
      </ul>
      {next && <button type="button" onClick={load}>More</button>}
    </main>
  );
}

// The placeholder that came with the upload; nothing is fetched for it.
function Thumb({ of }: { of: MediaItem }) {
  const inline = of.preview?.inline;
  return (
    <span class="thumb" style={{ background: of.preview?.dominant_color }}>
      {inline ? <img alt="" src={`data:${inline.type ?? "image/webp"};base64,${inline.data}`} /> : of.kind ?? "file"}
    </span>
  );
}

export function MediaPage({ id }: { id: string }) {
  const { value: media, error, again } = useLive(() => ask<Media>(`/v1/media/${id}`), [id], { media_id: id });
  const [timeline, setTimeline] = useState<Timeline>();
  const [chosen, setChosen] = useState<string>();
  const [fault, setFault] = useState<Error>();
  useEffect(() => { if (media) ask<Timeline>(`/v1/media/${id}/timeline`).then(setTimeline, setFault); }, [id, media?.state, media?.stage]);
  if (!media) return <main><h1>Media</h1><Fault error={error} /></main>;
  const remove = () => confirm("Delete this media and all its variants for good?")
    && ask(`/v1/media/${id}`, "DELETE").then(() => go("/ui/media"), setFault);
  const seen = media.variants.filter((v) => /^(image|video|audio)\/|mpegurl/.test(v.content_type) && !/\.(m4s|ts)$/.test(v.name));
  const variant = seen.find((v) => v.name === chosen) ?? seen.find((v) => v.content_type.includes("mpegurl") && v.name.includes("master"))
    ?? seen.find((v) => v.content_type.startsWith("video/")) ?? seen[0];
  return (
    <main>
      <h1>{media.filename ?? media.id}</h1>
      <p>
        <State of={media.state} /> <code>{media.id}</code> · {media.kind} · {size(media.size)}
        {media.width && <> · {media.width} × {media.height}</>}
        {media.duration_seconds && <> · {time(media.duration_seconds)}</>} · {media.recipe}@{media.recipe_version}
        {media.job && <> · <Link to={`/ui/jobs/${media.job.id}`}>its job</Link></>}
      </p>
      {["queued", "processing"].includes(media.state) && (
        <p role="status"><Bar percent={media.progress} label="Progress" /> {media.stage ?? media.state} {media.progress?.toFixed(0)}
          {media.job?.position && <> · number {media.job.position} in its queue</>}</p>
      )}
      <Why error={media.error} />
      <p class="actions">
        {["ready", "failed"].includes(media.state) &&
          <Act scope="media:write" on={() => make(`/v1/media/${id}/process`).then(again, setFault)}>Process again</Act>}
        <Act scope="media:delete" on={remove}>Delete</Act>
      </p>
      <Calls of={[
        { name: "get", method: "GET", path: `/v1/media/${id}`, python: `client.media.get("${id}")`, command: `mediamill media get ${id}` },
        { name: "process", method: "POST", path: `/v1/media/${id}/process`, python: `client.media.process("${id}")`, command: `mediamill media process ${id}`, body: {} },
        { name: "delete", method: "DELETE", path: `/v1/media/${id}`, python: `client.media.delete("${id}")`, command: `mediamill media delete ${id}` },
      ]} />
      <Fault error={fault ?? error} />
      {variant && media.kind && ["image", "video"].includes(media.kind) && variant.content_type.startsWith(`${media.kind}/`)
        && <Compare key={`compare ${variant.name}`} media={media} variant={variant} />}
      {variant && <Player key={variant.name} variant={variant} poster={media.variants.find((v) => v.name.startsWith("poster"))?.url} />}
      {media.variants.length > 0 && (
        <>
          <h2>Variants</h2>
          <div class="wide" tabIndex={0} role="region" aria-label="Variants">
            <table>
              <thead><tr><th>Name</th><th>Type</th><th>Size</th><th>Of the original</th><th>Pixels</th><th>Made in</th><th>Address</th></tr></thead>
              <tbody>
                {media.variants.map((v) => (
                  <tr key={v.name}>
                    <td>{seen.includes(v) ? <button type="button" class="plain" aria-pressed={v === variant} onClick={() => setChosen(v.name)}>{v.name}</button> : v.name}</td>
                    <td>{v.content_type}</td>
                    <td>{size(v.bytes)}</td>
                    <td>{((100 * v.bytes) / media.size).toFixed(0)} %</td>
                    <td>{v.width ? `${v.width} × ${v.height}` : ""}</td>
                    <td>{v.seconds == null ? "" : time(v.seconds)}</td>
                    <td><a href={v.url}>open</a></td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
      )}
      <Segments of={timeline} />
      <details><summary>JSON</summary><pre>{JSON.stringify(media, null, 2)}</pre></details>
    </main>
  );
}

