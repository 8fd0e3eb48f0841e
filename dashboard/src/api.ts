// The public API, as far as these pages use it. There is no other way in.

import type { components } from "./openapi"; // made from the API's own document, with every build

type Of<Name extends keyof components["schemas"]> = components["schemas"][Name];

export type Failure = Of<"Failed">;
export type Estimate = Of<"EstimateBody">;
export type Job = Of<"JobBody">;
export type FullJob = Of<"FullJob">;
export type Timeline = Of<"TimelineBody">;
export type DeadGroup = Of<"Group">;
export type Figures = Of<"FiguresBody">;
export type Queue = Of<"QueueBody">;
export type Worker = Of<"WorkerBody">;
export type Recipe = Of<"RecipeBody">;
export type Verdict = Of<"Verdict">;
export type DryRun = Of<"DryRunBody">;
export type Endpoint = Of<"EndpointBody">;
export type NewEndpoint = Of<"NewEndpointBody"> & Partial<Of<"RotatedBody">>;
export type Delivery = Of<"DeliveryBody">;
export type FullDelivery = Of<"FullDelivery">;
export type Letter = Of<"LetterBody">;
export type Me = Of<"SelfBody">;
export type Key = Of<"KeyBody">;
export type NewKey = Of<"NewKeyBody">;
export type Setting = Of<"Setting">;
export type Checks = Of<"ChecksBody">;
export type Variant = Of<"Variant">;
export interface Preview { dominant_color?: string; inline?: { data: string; type?: string } }
export type MediaItem = Omit<Of<"MediaItem">, "preview"> & { preview: Preview | null };
export type Media = Omit<Of<"MediaBody">, "preview"> & { preview: Preview | null };
export interface Page<T> { data: T[]; next_cursor?: string | null }

const KEY = "mediamill-key";

export const key = () => sessionStorage.getItem(KEY);
export const signOut = () => { sessionStorage.removeItem(KEY); known = undefined; };
export const keep = (value: string) => sessionStorage.setItem(KEY, value);

export class Problem extends Error {
  constructor(readonly status: number, readonly code: string, detail: string, readonly advice: string) {
    super(detail);
  }
}

async function send(path: string, method: string, body: unknown, more: Record<string, string>): Promise<Response> {
  const headers: Record<string, string> = { Authorization: `Bearer ${key()}`, ...more };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401) dispatchEvent(new Event("signed-out"));
  const faults: { pointer?: string; parameter?: string; detail: string }[] = said.errors ?? [];
  const detail = [said.detail ?? answer.statusText, ...faults.map((f) => `${f.pointer ?? f.parameter}: ${f.detail}`)].join(" ");
  throw new Problem(answer.status, said.code ?? String(answer.status), detail, said.advice ?? "");
}

export async function ask<T>(path: string, method = "GET", body?: unknown, more: Record<string, string> = {}): Promise<T> {
  const answer = await send(path, method, body, more);
  return answer.status === 204 ? (undefined as T) : answer.json();
}

// Bytes that only a key reads.
export const download = (path: string) => send(path, "GET", undefined, {}).then((answer) => answer.blob());

// Makes something: a click that is sent twice makes it once.
export const make = <T>(path: string, body: unknown = {}) => ask<T>(path, "POST", body, { "Idempotency-Key": `"${once()}"` });
const once = () => [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("");

// Changes what nobody else has changed since it was read here.
export async function change<T>(path: string, method: "PATCH" | "DELETE", body?: unknown): Promise<T> {
  const etag = (await send(path, "GET", undefined, {})).headers.get("ETag") ?? "";
  return ask<T>(path, method, body, { "If-Match": etag });
}

// A key that this machine gives to its own browser, where an operator allows that.
export async function signIn(): Promise<boolean> {
  if (!key()) {
    const answer = await fetch("/ui/session", { method: "POST" });
    if (!answer.ok) return false;
    keep((await answer.json()).api_key);
  }
  known = await ask<Me>("/v1/keys/self");
  return true;
}

// Whose key it is and what it may do; the pages show nothing else to press.
let known: Me | undefined;
export const me = (): Me => known ?? { schema_version: 1, id: "", tenant: "", role: null, may: [] };
export const may = (scope: string) => me().may.includes(scope);

// Calls back after every change, at most twice a second, over cuts; returns what ends it.
export function follow(what: { media_id?: string; job_id?: string }, changed: (data: unknown) => void): () => void {
  let source: EventSource | undefined, over = false, timer = 0;
  const heard = (event: MessageEvent) => {
    const data = event.type === "job.progress" ? JSON.parse(event.data).data : undefined;
    if (data) return changed(data);
    clearTimeout(timer);
    timer = setTimeout(() => changed(undefined), 500);
  };
  const open = async () => {
    if (over) return;
    try {
      const { url } = await ask<{ url: string }>("/v1/stream-urls", "POST", what);
      if (over) return;
      const address = new URL(url);
      source = new EventSource(address.pathname + address.search);
      for (const type of TYPES) source.addEventListener(type, heard);
      source.onerror = () => { source?.close(); timer = setTimeout(open, 3000); };
    } catch { timer = setTimeout(open, 5000); }
  };
  open();
  return () => { over = true; clearTimeout(timer); source?.close(); };
}

const TYPES = [
  "snapshot", "reset", "job.progress", "variant.ready",
  ...["uploaded", "queued", "processing", "preview", "ready", "failed", "expired", "deleted"].map((s) => `media.${s}`),
  ...["queued", "processing", "completed", "failed", "canceled", "dead_lettered"].map((s) => `job.${s}`),
];
