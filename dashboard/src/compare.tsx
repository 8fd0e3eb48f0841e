import { useEffect, useRef, useState } from "preact/hooks";
import { download, type Media, type Variant } from "./api";
import { size } from "./parts";

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

function Slider({ media, variant }: { media: Media; variant: Variant }) {
  const [source, setSource] = useState<string>();
  const [fault, setFault] = useState("");
  const [likeness, setLikeness] = useState<number | null>();
  const [at, setAt] = useState(50);
  const [url] = useState(variant.url);
  const images = useRef<[HTMLImageElement | null, HTMLImageElement | null]>([null, null]);
  useEffect(() => {
    let made: string | undefined, over = false;
    download(`/v1/media/${media.id}/original`).then((blob) => {
      if (!over) setSource(made = URL.createObjectURL(blob));
    }, (e) => setFault(e.message));
    return () => { over = true; if (made) URL.revokeObjectURL(made); };
  }, []);
  const measured = () => {
    const [before, after] = images.current;
    if (!before?.naturalWidth || !after?.naturalWidth) return;
    compared(before, after).then(setLikeness, () => setLikeness(null)); // pictures of another origin cannot be read
  };
  const saved = 1 - variant.bytes / media.size;
  if (fault) return <p role="alert" class="fault">The original cannot be had: {fault}</p>;
  return (
    <figure class="compare">
      <div class="both" style={{ "--at": `${at}%` }}>
        <img ref={(e) => { images.current[1] = e; }} crossorigin="anonymous" src={url} alt={`Variant ${variant.name}`} onLoad={measured} />
        {source && <img ref={(e) => { images.current[0] = e; }} class="over" src={source} alt="The original" onLoad={measured}
          onError={() => setFault(`this browser cannot show ${media.detected_type ?? media.content_type}`)} />}
      </div>
      <label>Original ↔ {variant.name} <input type="range" min={0} max={100} value={at} onInput={(e) => setAt(Number(e.currentTarget.value))} /></label>
      <figcaption>
        {size(media.size)} → {size(variant.bytes)}: {saved >= 0 ? `${(100 * saved).toFixed(0)} % saved` : `${(-100 * saved).toFixed(0)} % more`} ·{" "}
        {likeness === undefined ? "comparing…" : likeness === null ? "likeness cannot be measured here" : `likeness ${likeness.toFixed(3)}`}
        {likeness != null && <small> (SSIM of the brightness at the variant's size, 1 is equal)</small>}
      </figcaption>
    </figure>
  );
}

// How alike both are, at the variant's size, of which the longer side is at most 512 pixels here.
async function compared(before: HTMLImageElement, after: HTMLImageElement): Promise<number> {
  const { ssim } = await import("ssim.js");
  const scale = Math.min(1, MOST_SIDE / Math.max(after.naturalWidth, after.naturalHeight));
  const width = Math.max(1, Math.round(after.naturalWidth * scale)), height = Math.max(1, Math.round(after.naturalHeight * scale));
  const pixels = (image: HTMLImageElement) => {
    const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d")!;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, width, height);
    return context.getImageData(0, 0, width, height);
  };
  return ssim(pixels(before), pixels(after)).mssim;
}
