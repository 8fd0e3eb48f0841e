import { defineConfig } from "vite";

// The API serves the result under /ui; for `npm run dev` it must run on its usual port.
export default defineConfig({
  base: "/ui/",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: { outDir: "../src/mediamill/dashboard", emptyOutDir: true, modulePreload: { polyfill: false } },
  server: { proxy: { "^/(v1|storage|play|readyz|ui/session)": "http://127.0.0.1:8080" } },
});
