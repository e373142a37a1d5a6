// Both ends of the router's bench, quick enough that what stands between them is what saturates.
//   router_tools engine PORT EVENTS INTERVAL_MS    a stand-in for an engine: plain answers, streams, gauges
//   router_tools plain  PORT CONNECTIONS SECONDS KEY    closed loop; prints: requests errors
//   router_tools stream PORT STREAMS SECONDS KEY        prints: events errors p50_us p99_us
// Events are numbered and carry the time at which they were written, so the reader checks each byte and its delay.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FDS 16384
#define ROOM 32768
typedef struct { char in[ROOM], text[ROOM]; int used, size, in_body, next_event; long due, left; } Line;
static Line *lines[FDS];
static int events_per_stream, interval_ms, top;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void put(int fd, const char *data, int size) {
    while (size > 0) {
        int done = write(fd, data, size);
        if (done < 0 && errno != EAGAIN) return;
        if (done > 0) { data += done; size -= done; }
    }
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in at = {0};
    at.sin_family = AF_INET; at.sin_port = htons(port); at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

static void watch(int poll, int fd) {
    int one = 1;
    struct epoll_event add = {0};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    add.events = EPOLLIN; add.data.fd = fd;
    epoll_ctl(poll, EPOLL_CTL_ADD, fd, &add);
    lines[fd] = calloc(1, sizeof(Line));
    if (fd > top) top = fd;
}

static int write_event(char *out, int number, long at) {
    char data[256];
    int size = snprintf(data, sizeof data,
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":"
        "{\"content\":\" word\"},\"finish_reason\":null}],\"n\":%d,\"t\":%ld}\n\n", number, at);
    return sprintf(out, "%x\r\n%s\r\n", size, data);
}

static const char PLAIN[] =
    "{\"object\":\"chat.completion\",\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"once upon a time there was a gate\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":8}}";
static const char GAUGES[] = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n";

static void answer(int fd, Line *line) {
    char *end, out[2048];
    while ((end = memmem(line->in, line->used, "\r\n\r\n", 4))) {
        int head = end + 4 - line->in, length = 0;
        end[2] = 0;
        char *field = strcasestr(line->in, "\ncontent-length:");
        end[2] = '\r';
        if (field) length = atoi(field + 16);
        if (line->used < head + length) return;
        int get = line->in[0] == 'G', streamed = memmem(line->in + head, length, "\"stream\":true", 13) != 0;
        memmove(line->in, line->in + head + length, line->used - head - length);
        line->used -= head + length;
        if (streamed) {
            static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            put(fd, HEAD, sizeof HEAD - 1);
            line->left = events_per_stream; line->next_event = 0;
            line->due = now_us() + rand() % (interval_ms * 1000 + 1);
        } else {
            const char *body = get ? GAUGES : PLAIN;
            put(fd, out, sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                                 strlen(body), body));
        }
    }
}

static void send_due(void) {
    static const char LAST[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    long now = now_us();
    for (int fd = 0; fd <= top; fd++) {
        Line *line = lines[fd];
        char out[512];
        if (!line || !line->due || line->due > now) continue;
        if (line->left-- > 0) {
            put(fd, out, write_event(out, line->next_event++, now));
            line->due += interval_ms * 1000;
        } else {
            put(fd, LAST, sizeof LAST - 1);
            line->due = 0;
        }
    }
}

static int engine(int port) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, poll = epoll_create1(0);
    struct sockaddr_in at = loopback(port);
    struct epoll_event ready[256];
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4096)) { perror("listen"); return 1; }
    watch(poll, listener);
    for (;;) {
        int count = epoll_wait(poll, ready, 256, 1);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                int peer = accept(listener, 0, 0);
                if (peer >= 0 && peer < FDS) watch(poll, peer);
                continue;
            }
            Line *line = lines[fd];
            int got = read(fd, line->in + line->used, ROOM - line->used);
            if (got <= 0) { close(fd); free(line); lines[fd] = 0; continue; }
            line->used += got;
            answer(fd, line);
        }
        send_due();
    }
}

static int rising(const void *a, const void *b) { return *(long *)a < *(long *)b ? -1 : *(long *)a > *(long *)b; }

static long *late, late_count, errors, finished;

// Take whole responses off the line; return 1 when the request was answered to its end.
static int take_plain(Line *line) {
    char *end = memmem(line->in, line->used, "\r\n\r\n", 4);
    if (!end) return 0;
    int head = end + 4 - line->in;
    if (line->used < head + (int)sizeof PLAIN - 1) return 0;
    if (memcmp(line->in, "HTTP/1.1 200", 12) || memcmp(line->in + head, PLAIN, sizeof PLAIN - 1)) errors++;
    line->used = 0;
    return 1;
}

// Check the whole events that stand in the payload; what is left of it stays.
static void take_events(Line *line, long now) {
    char *at = line->text, *end, expected[512];
    line->text[line->size] = 0;
    while ((end = strstr(at, "\n\n"))) {
        char *stamp = strstr(at, "\"t\":");
        if (!strncmp(at, "data: [DONE]", 12)) {
            if (line->next_event != events_per_stream) errors++;
            line->next_event = 0;
        } else {
            long written = stamp && stamp < end ? atol(stamp + 4) : 0;
            int framed = write_event(expected, line->next_event++, written), head = strstr(expected, "\r\n") + 2 - expected;
            if (end + 2 - at != framed - head - 2 || memcmp(at, expected + head, end + 2 - at)) errors++;
            if (late_count < 1 << 23) late[late_count++] = now - written;
        }
        at = end + 2;
    }
    line->size -= at - line->text;
    memmove(line->text, at, line->size);
}

// Take whole chunks; return 1 after the last. A chunk may hold any part of the stream.
static int take_stream(Line *line) {
    long now = now_us();
    char *at = line->in, *stop = line->in + line->used, *mark;
    int over = 0;
    line->in[line->used] = 0;
    if (!line->in_body) {
        if (!(mark = strstr(at, "\r\n\r\n"))) return 0;
        if (memcmp(at, "HTTP/1.1 200", 12)) errors++;
        at = mark + 4;
        line->in_body = 1;
    }
    while (!over && (mark = memmem(at, stop - at, "\r\n", 2))) {
        long size = strtol(at, 0, 16);
        if (stop - mark < size + 4) break;
        if (size == 0) over = 1;
        if (line->size + size >= ROOM) { errors++; line->size = 0; }
        memcpy(line->text + line->size, mark + 2, size);
        line->size += size;
        at = mark + size + 4;
    }
    line->used = stop - at;
    memmove(line->in, at, line->used);
    take_events(line, now);
    if (over) { errors += line->size != 0 || line->next_event != 0; line->in_body = 0; line->size = 0; line->next_event = 0; }
    return over;
}

static int load(int port, int count, double seconds, const char *key, int streamed) {
    char request[1024], body[256];
    struct epoll_event ready[256];
    int poll = epoll_create1(0);
    sprintf(body, "{\"model\":\"m\",%s\"messages\":[{\"role\":\"user\",\"content\":\"tell me a story about a gate\"}]}",
            streamed ? "\"stream\":true," : "");
    int size = snprintf(request, sizeof request, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer %s\r\n"
                        "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", key, strlen(body), body);
    late = malloc((1 << 23) * sizeof *late);
    for (int i = 0; i < count; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in to = loopback(port);
        if (connect(fd, (void *)&to, sizeof to)) { perror("connect"); return 1; }
        watch(poll, fd);
        put(fd, request, size);
    }
    long end = now_us() + seconds * 1e6;
    while (now_us() < end) {
        int n = epoll_wait(poll, ready, 256, 100);
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            Line *line = lines[fd];
            int got = read(fd, line->in + line->used, ROOM - line->used - 1);
            if (got <= 0) { errors++; epoll_ctl(poll, EPOLL_CTL_DEL, fd, 0); close(fd); continue; }
            line->used += got;
            if (streamed ? take_stream(line) : take_plain(line)) { finished++; put(fd, request, size); }
        }
    }
    if (!streamed) { printf("%ld %ld\n", finished, errors); return 0; }
    qsort(late, late_count, sizeof *late, rising);
    printf("%ld %ld %ld %ld\n", late_count, errors, late_count ? late[late_count / 2] : -1,
           late_count ? late[(late_count - 1) * 99 / 100] : -1);
    return 0;
}

int main(int argc, char **argv) {
    struct rlimit files = {FDS, FDS};
    setrlimit(RLIMIT_NOFILE, &files);
    const char *spec = getenv("EVENTS_PER_STREAM");
    events_per_stream = spec ? atoi(spec) : 64;
    if (argc == 5 && !strcmp(argv[1], "engine")) {
        events_per_stream = atoi(argv[3]); interval_ms = atoi(argv[4]);
        return engine(atoi(argv[2]));
    }
    if (argc == 6) return load(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), argv[5], !strcmp(argv[1], "stream"));
    fprintf(stderr, "usage: router_tools engine|plain|stream ...\n");
    return 2;
}
