import type Hls from "hls.js";
import { h, type ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Variant } from "./api";

// A part of the player's controls, which are elements of their own: see controls.ts.
const part = (name: string, attributes: Record<string, unknown> = {}, ...children: ComponentChildren[]) => h(name, attributes, ...children);

export function Player({ variant, poster }: { variant: Variant; poster?: string }) {
  const video = useRef<HTMLVideoElement>(null);
  const [url] = useState(variant.url); // a renewed address must not start it again
  const [fault, setFault] = useState("");
  const [ready, setReady] = useState(false);
  const streams = variant.content_type.includes("mpegurl");
  const image = variant.content_type.startsWith("image/");
  useEffect(() => {
    let player: Hls | undefined, over = false;
    if (image) return;
    const failed = (e: Error) => setFault(e.message);
    import("./controls").then(() => { if (!over) setReady(true); }, failed);
    if (streams) {
      import("hls.js/light").then(({ default: Player }) => {
        const element = video.current;
        if (over || !element) return;
        if (!Player.isSupported()) { element.src = url; return; }
        player = new Player();
        player.on(Player.Events.ERROR, (_, e) => { if (e.fatal) setFault(e.details); });
        player.loadSource(url);
        player.attachMedia(element);
      }, failed);
    }
    return () => { over = true; player?.destroy(); };
  }, [url]);
  if (image) return <img class="player" src={url} alt={`Variant ${variant.name}`} />;
  const sound = variant.content_type.startsWith("audio/") && !streams;
  // Its own controls until the others are there.
  const media = sound
    ? <audio slot="media" controls={!ready} src={url} />
    : <video slot="media" ref={video} class="player" controls={!ready} playsInline muted poster={poster} src={streams ? undefined : url} />;
  return (
    <>
      {part("media-controller", { class: "player", ...(sound && { audio: true }) }, media, ready && part("media-control-bar", {},
        part("media-play-button"), part("media-time-range", {}, part("media-preview-time-display", { slot: "preview" })), part("media-time-display", { showduration: true }),
        part("media-mute-button"), part("media-volume-range"), part("media-playback-rate-button"),
        !sound && part("media-captions-button", { ref: (e: Element | null) => e?.setAttribute("role", "switch") }), !sound && part("media-pip-button"), !sound && part("media-fullscreen-button")))}
      {fault && <p role="alert" class="fault">It cannot be played: {fault}</p>}
    </>
  );
}
