import { useEffect, useRef, useState } from "preact/hooks";
import { download, type Media, type Variant } from "./api";
import { size, time } from "./parts";

const MOST_BYTES = 64e6;
const MOST_SIDE = 512;

// The original under a variant, with a divider that is moved by pointer or keys.
export function Compare({ media, variant }: { media: Media; variant: Variant }) {
  const [open, setOpen] = useState(false);
  return (
    <details onToggle={(e) => e.target === e.currentTarget && setOpen(e.currentTarget.open)}>
      <summary>Compare with the original</summary>
      {open && (media.size > MOST_BYTES ? <p>The original is too large to be shown here ({size(media.size)}).</p> : <Slider media={media} variant={variant} />)}
    </details>
  );
}

type Picture = HTMLImageElement | HTMLVideoElement;

function Slider({ media, variant }: { media: Media; variant: Variant }) {
  const [source, setSource] = useState<string>();
  const [fault, setFault] = useState("");
  const [likeness, setLikeness] = useState<number | null>();
  const [at, setAt] = useState(50);
  const [moment, setMoment] = useState(0);
  const [length, setLength] = useState(0);
  const [plays, setPlays] = useState(false);
  const [url] = useState(variant.url);
  const pictures = useRef<[Picture | null, Picture | null]>([null, null]);
  const film = variant.content_type.startsWith("video/");
  const films = () => pictures.current.filter((p) => p instanceof HTMLVideoElement);
  useEffect(() => {
    let made: string | undefined, over = false;
    download(`/v1/media/${media.id}/original`).then((blob) => {
      if (!over) setSource(made = URL.createObjectURL(blob));
    }, (e) => setFault(e.message));
    return () => { over = true; if (made) URL.revokeObjectURL(made); };
  }, []);
  const measured = () => {
    const [before, after] = pictures.current;
    if (!before || !after || !sides(before)[0] || !sides(after)[0]) return;
    if (films().some((f) => f.seeking || f.readyState < 2 || !f.paused)) return; // not the same frame yet
    compared(before, after).then(setLikeness, () => setLikeness(null)); // pictures of another origin cannot be read
  };
  const seek = (seconds: number) => { setMoment(seconds); setLikeness(undefined); for (const f of films()) f.currentTime = seconds; };
  const turn = () => {
    const [before, after] = films();
    if (plays) { for (const f of films()) f.pause(); setPlays(false); seek(after?.currentTime ?? 0); return; }
    setPlays(true);
    setLikeness(undefined);
    for (const f of [before, after]) f?.play().catch((e: Error) => setFault(e.message));
  };
  // The original follows the variant, which is the one whose time is shown.
  const followed = () => {
    const [before, after] = films();
    if (!before || !after || after.paused) return;
    setMoment(after.currentTime);
    if (Math.abs(before.currentTime - after.currentTime) > 0.15) before.currentTime = after.currentTime;
  };
  // Not the first frame: many films begin in black.
  const loaded = () => {
    const [before, after] = films();
    if (!before?.duration || !after?.duration) return;
    setLength(after.duration);
    seek(Math.min(1, after.duration / 2));
  };
  const unseen = () => setFault(`this browser cannot show ${media.detected_type ?? media.content_type}`);
  const saved = 1 - variant.bytes / media.size;
  if (fault) return <p role="alert" class="fault">The original cannot be shown: {fault}</p>;
  return (
    <figure class="compare">
      <div class="both" style={{ "--at": `${at}%` }}>
        {film
          ? <video ref={(e) => { pictures.current[1] = e; }} crossorigin="anonymous" muted playsInline preload="auto" src={url} aria-label={`Variant ${variant.name}`}
              onLoadedMetadata={loaded} onSeeked={measured} onTimeUpdate={followed} onEnded={() => { for (const f of films()) f.pause(); setPlays(false); }} />
          : <img ref={(e) => { pictures.current[1] = e; }} crossorigin="anonymous" src={url} alt={`Variant ${variant.name}`} onLoad={measured} />}
        {source && (film
          ? <video ref={(e) => { pictures.current[0] = e; }} class="over" muted playsInline preload="auto" src={source} aria-label="The original"
              onLoadedMetadata={loaded} onSeeked={measured} onError={unseen} />
          : <img ref={(e) => { pictures.current[0] = e; }} class="over" src={source} alt="The original" onLoad={measured} onError={unseen} />)}
      </div>
      <label>Original ↔ {variant.name} <input type="range" min={0} max={100} value={at} onInput={(e) => setAt(Number(e.currentTarget.value))} /></label>
      {film && length > 0 && (
        <p class="actions">
          <button type="button" onClick={turn}>{plays ? "Pause both" : "Play both"}</button>
          <label>At {time(moment)} <input type="range" min={0} max={length} step="any" value={moment} onInput={(e) => seek(Number(e.currentTarget.value))} /></label>
        </p>
      )}
      <figcaption>
        {size(media.size)} → {size(variant.bytes)}: {saved >= 0 ? `${(100 * saved).toFixed(0)} % saved` : `${(-100 * saved).toFixed(0)} % more`} ·{" "}
        {likeness === undefined ? (plays ? "pause to compare" : "comparing…") : likeness === null ? "likeness cannot be measured here" : `likeness ${likeness.toFixed(3)}`}
        {likeness != null && <small> (SSIM of {film ? "this frame's" : "the"} brightness at the variant's size, 1 is equal)</small>}
      </figcaption>
    </figure>
  );
}

const sides = (of: Picture) => of instanceof HTMLVideoElement ? [of.videoWidth, of.videoHeight] : [of.naturalWidth, of.naturalHeight];

// How alike both are, at the variant's size, of which the longer side is at most 512 pixels here.
async function compared(before: Picture, after: Picture): Promise<number> {
  const { ssim } = await import("ssim.js");
  const scale = Math.min(1, MOST_SIDE / Math.max(...sides(after)));
  const [width, height] = sides(after).map((side) => Math.max(1, Math.round(side * scale)));
  const pixels = (image: Picture) => {
    const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d")!;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, width, height);
    return context.getImageData(0, 0, width, height);
  };
  return ssim(pixels(before), pixels(after)).mssim;
}
