"""The object store of the scenario `remote`, without a link."""

import contextlib
import http.client
import json
import tempfile
import threading
import unittest

from isobath_bench.remote.store import Store


class Objects(unittest.TestCase):
    def setUp(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        store = self.enterContext(Store(directory))
        threading.Thread(target=store.serve_forever, args=[0.01], daemon=True).start()
        self.addCleanup(store.shutdown)
        connection = http.client.HTTPConnection("127.0.0.1", store.server_port)
        self.connection = self.enterContext(contextlib.closing(connection))

    def ask(self, method, path, body=None, **headers):
        """A request on the one connection: status, body and headers of the answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, named)
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def test_what_was_put_is_there_whole_and_in_parts(self):
        self.assertEqual(self.ask("PUT", "/b/layers/one", b"0123456789")[0], 200)
        self.assertEqual(self.ask("GET", "/b/layers/one")[:2], (200, b"0123456789"))
        for asked, status, body in (
            ("bytes=0-0", 206, b"0"),
            ("bytes=2-4", 206, b"234"),
            ("bytes=7-99", 206, b"789"),
            ("bytes=4-", 206, b"456789"),
            ("bytes=-3", 206, b"789"),
            ("bytes=10-12", 416, b""),
        ):
            self.assertEqual(self.ask("GET", "/b/layers/one", Range=asked)[:2], (status, body), asked)
        _, _, headers = self.ask("GET", "/b/layers/one", Range="bytes=2-4")
        self.assertEqual(headers["Content-Range"], "bytes 2-4/10")
        status, body, headers = self.ask("HEAD", "/b/layers/one")
        self.assertEqual((status, body, headers["Content-Length"]), (200, b"", "10"))
        self.assertEqual([self.ask(how, "/b/layers/other")[0] for how in ("GET", "HEAD")], [404, 404])
        self.assertEqual(self.ask("DELETE", "/b/layers/one")[0], 204)
        self.assertEqual(self.ask("GET", "/b/layers/one")[0], 404)

    def test_an_object_is_put_only_under_its_condition(self):
        first = self.ask("PUT", "/b/m", b"first", If_None_Match="*")
        self.assertEqual(first[0], 200)
        self.assertEqual(self.ask("PUT", "/b/m", b"second", If_None_Match="*")[0], 412)
        self.assertEqual(self.ask("HEAD", "/b/m")[2]["ETag"], first[2]["ETag"])
        second = self.ask("PUT", "/b/m", b"second", If_Match=first[2]["ETag"])
        self.assertEqual(second[0], 200)
        self.assertEqual(self.ask("PUT", "/b/m", b"third", If_Match=first[2]["ETag"])[0], 412)
        self.assertEqual(self.ask("PUT", "/b/none", b"third", If_Match=first[2]["ETag"])[0], 412)
        self.assertEqual(self.ask("GET", "/b/m")[:2], (200, b"second"))

    def test_an_object_is_put_in_parts(self):
        def begin():
            return self.ask("POST", "/b/layers/two?uploads")[1].split(b"UploadId>")[1][:-2].decode()

        upload = begin()
        for number, part in ((2, b"second"), (1, b"first")):
            path = f"/b/layers/two?partNumber={number}&uploadId={upload}"
            self.assertEqual(self.ask("PUT", path, part)[0], 200)
        self.assertEqual(self.ask("GET", "/b/layers/two")[0], 404)
        self.assertEqual(self.ask("POST", f"/b/layers/two?uploadId={upload}", b"<parts/>")[0], 200)
        self.assertEqual(self.ask("GET", "/b/layers/two")[:2], (200, b"firstsecond"))
        self.assertEqual(self.ask("POST", f"/b/layers/two?uploadId={upload}")[0], 404)
        upload = begin()
        self.assertEqual(self.ask("DELETE", f"/b/layers/two?uploadId={upload}")[0], 204)
        self.assertEqual(self.ask("PUT", f"/b/layers/two?partNumber=1&uploadId={upload}", b"late")[0], 404)

    def test_objects_are_listed_and_removed_together(self):
        for key in ("layers/a&b", "layers/c", "manifests/d"):
            self.ask("PUT", f"/b/{key}", b"12")
        listed = self.ask("GET", "/b?list-type=2&prefix=layers/")[1]
        self.assertEqual(listed.count(b"<Contents>"), 2)
        self.assertIn(b"<Key>layers/a&amp;b</Key><Size>2</Size>", listed)
        keys = "<Delete><Object><Key>layers/a&amp;b</Key></Object><Object><Key>layers/c</Key></Object></Delete>"
        self.assertEqual(self.ask("POST", "/b?delete", keys)[1].count(b"<Deleted>"), 2)
        self.assertEqual(self.ask("GET", "/b?list-type=2")[1].count(b"<Contents>"), 1)

    def test_it_counts_requests_and_bytes_until_it_is_asked(self):
        self.ask("PUT", "/b/layers/one", b"0123456789")
        self.ask("GET", "/b/layers/one")
        self.ask("GET", "/b/layers/one", Range="bytes=2-4")
        self.ask("HEAD", "/b/layers/one")
        self.ask("PUT", "/b/gc.lock", b"1")
        requests = {"PUT layers": 1, "GET layers": 2, "HEAD layers": 1, "PUT gc.lock": 1}
        counts = json.loads(self.ask("GET", "/-/counts")[1])
        self.assertEqual(counts, {"requests": requests, "fetched": 13, "sent": 11})
        self.assertEqual(json.loads(self.ask("GET", "/-/counts")[1]), {"requests": {}, "fetched": 0, "sent": 0})


if __name__ == "__main__":
    unittest.main()
