// What runs in the browser: one file of random bytes by each plugin, and its hash for the test.
import Uppy from '@uppy/core'
import AwsS3 from '@uppy/aws-s3'
import Tus from '@uppy/tus'

function bytes(size) {
  const data = new Uint8Array(size)
  for (let at = 0; at < size; at += 65536) crypto.getRandomValues(data.subarray(at, at + 65536))
  return data
}

async function hex(data) {
  const digest = await crypto.subtle.digest('SHA-256', data)
  return [...new Uint8Array(digest)].map((b) => b.toString(16).padStart(2, '0')).join('')
}

async function sent(uppy, data, name) {
  uppy.addFile({ name, type: 'video/mp4', data: new Blob([data], { type: 'video/mp4' }) })
  const result = await uppy.upload()
  const failed = result.failed.map((file) => String(file.error))
  return { sha256: await hex(data), failed, url: result.successful[0]?.uploadURL ?? null }
}

window.run = async ({ companion, sign, tus, key, size, parts = true }) => {
  const data = bytes(size)
  if (sign) {
    const signRequest = async (request) => {
      const body = JSON.stringify(parts ? request : { ...request, size })
      const headers = { 'Content-Type': 'application/json' }
      const answer = await fetch(sign, { method: 'POST', headers, body })
      if (!answer.ok) throw new Error(await answer.text())
      return answer.json()
    }
    const uppy = new Uppy().use(AwsS3, { signRequest, shouldUseMultipart: parts })
    return sent(uppy, data, 'by signatures ä.mp4')
  }
  if (companion) {
    const uppy = new Uppy().use(AwsS3, { companionEndpoint: companion, shouldUseMultipart: true })
    return sent(uppy, data, 'by parts ä.mp4')
  }
  const headers = { Authorization: `Bearer ${key}` }
  const uppy = new Uppy().use(Tus, { endpoint: tus, headers, chunkSize: 1 << 20 })
  return sent(uppy, data, 'by tus ä.mp4')
}
