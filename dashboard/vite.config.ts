import { gzipSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

const MOST = 60 * 1024;

// What the first page needs must stay small: its script, what that imports at once, and its styles.
const budget: Plugin = {
  name: "budget",
  generateBundle(_, bundle) {
    const wanted = Object.values(bundle).filter((part) => part.type === "chunk" && part.isEntry).map((part) => part.fileName);
    for (const name of wanted) {
      const part = bundle[name];
      if (part.type === "chunk") wanted.push(...[...part.imports, ...(part.viteMetadata?.importedCss ?? [])].filter((n) => !wanted.includes(n)));
    }
    const bytes = wanted.reduce((sum, name) => {
      const part = bundle[name];
      return sum + gzipSync(part.type === "chunk" ? part.code : part.source).length;
    }, 0);
    if (bytes > MOST) this.error(`The first page takes ${bytes} bytes when compressed; ${MOST} are allowed. Load more on demand.`);
    console.log(`first page: ${bytes} of ${MOST} bytes (${wanted.join(", ")})`);
  },
};

// The API serves the result under /ui; for `npm run dev` it must run on its usual port.
export default defineConfig({
  base: "/ui/",
  plugins: [budget],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: { outDir: "../src/mediamill/dashboard", emptyOutDir: true, modulePreload: { polyfill: false } },
  server: { proxy: { "^/(v1|storage|play|readyz|ui/session)": "http://127.0.0.1:8080" } },
});
