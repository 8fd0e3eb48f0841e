// tus-js-client in Node: tus.mjs ENDPOINT KEY FILE MODE
import fs from 'node:fs'
import * as tus from 'tus-js-client'

const [endpoint, key, path, mode] = process.argv.slice(2)
const modes = {
  whole: { file: () => fs.readFileSync(path), options: {} },
  chunks: { file: () => fs.readFileSync(path), options: { chunkSize: 100_000 } },
  parallel: { file: () => fs.createReadStream(path), options: { parallelUploads: 3 } },
  deferred: {
    file: () => fs.createReadStream(path),
    options: { uploadLengthDeferred: true, chunkSize: 100_000 },
  },
}
const { file, options } = modes[mode]
const upload = new tus.Upload(file(), {
  endpoint,
  headers: { Authorization: `Bearer ${key}` },
  metadata: { filename: 'node ä.jpg', filetype: 'image/jpeg' },
  retryDelays: [100, 300],
  ...options,
  onError: (error) => {
    console.error(String(error))
    process.exit(1)
  },
  onSuccess: () => {
    console.log(JSON.stringify({ url: upload.url }))
    process.exit(0)
  },
})
upload.start()
