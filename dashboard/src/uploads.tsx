import { useRef, useState } from "preact/hooks";
import { ask, key, type Page, type Recipe } from "./api";
import { Bar, Link, Needs, size, useLive } from "./parts";

interface Sent { file: File; percent: number; state: string; media?: string; calls: string[] }

export const Uploads = () => <main><h1>Uploads</h1><Needs scope="uploads:write" for="Uploads"><Drop /></Needs></main>;

function Drop() {
  const [sent, setSent] = useState<Sent[]>([]);
  const [recipe, setRecipe] = useState("web");
  const [over, setOver] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  const { value: recipes } = useLive(() => ask<Page<Recipe>>("/v1/recipes"), [], undefined, 60);

  const send = async (file: File) => {
    const { Upload } = await import("tus-js-client");
    const one: Sent = { file, percent: 0, state: "sending", calls: [] };
    const show = (change: Partial<Sent>) => { Object.assign(one, change); setSent((all) => (all.includes(one) ? [...all] : [one, ...all])); };
    show({});
    const upload = new Upload(file, {
      endpoint: "/v1/uploads/",
      headers: { Authorization: `Bearer ${key()}` },
      metadata: { filename: file.name, filetype: file.type, recipe },
      chunkSize: 16 << 20,
      removeFingerprintOnSuccess: true,
      onAfterResponse: (request, response) => {
        const media = response.getHeader("Mediamill-Media")?.split("/").pop();
        show({ calls: [...one.calls, `${request.getMethod()} ${request.getURL()} → ${response.getStatus()}`], ...(media && { media }) });
      },
      onProgress: (done, all) => show({ percent: (100 * done) / all }),
      onError: (error) => show({ state: `failed: ${error.message}` }),
      onSuccess: () => show({ percent: 100, state: "sent" }),
    });
    const [earlier] = await upload.findPreviousUploads(); // of the same file, in this browser
    if (earlier) upload.resumeFromPreviousUpload(earlier);
    upload.start();
  };
  const take = (files: FileList | null | undefined) => { for (const file of files ?? []) send(file); };
  return (
    <>
      <p>
        <label>Recipe <select value={recipe} onChange={(e) => setRecipe(e.currentTarget.value)}>
          {(recipes?.data ?? [{ name: "web" }]).map((r) => <option>{r.name}</option>)}
        </select></label>
      </p>
      <div class={over ? "drop over" : "drop"}
        onDragOver={(e) => { e.preventDefault(); setOver(true); }}
        onDragLeave={() => setOver(false)}
        onDrop={(e) => { e.preventDefault(); setOver(false); take(e.dataTransfer?.files); }}>
        <p>Drop files here, or</p>
        <button type="button" onClick={() => input.current?.click()}>Choose files</button>
        <input ref={input} type="file" multiple hidden aria-label="Files" onChange={(e) => { take(e.currentTarget.files); e.currentTarget.value = ""; }} />
      </div>
      <ul class="sent">
        {sent.map((s) => (
          <li>
            <b>{s.file.name}</b> {size(s.file.size)} <Bar percent={s.percent} label={`Upload of ${s.file.name}`} /> {s.state}{" "}
            {s.state === "sent" && s.media && <Link to={`/ui/media/${s.media}`}>See it</Link>}
            <details><summary>Its API calls</summary><pre>{s.calls.join("\n")}</pre></details>
          </li>
        ))}
      </ul>
      <p>An upload that is cut off goes on where it was: drop the same file again.</p>
    </>
  );
}
