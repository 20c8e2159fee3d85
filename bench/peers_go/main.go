// Command cadvisor is cAdvisor as a person or a kubelet runs it, put together from the project's own library: its raw
// cgroup handler, its manager, its Prometheus collectors. The project's own command has no version that Go can fetch.
// Container runtimes are left out: where the bench runs there are none to ask. Flags are the library's, and those below,
// which have the names, meanings and defaults of the project's command.
package main

import (
	"flag"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/google/cadvisor/cache/memory"
	"github.com/google/cadvisor/container"
	v2 "github.com/google/cadvisor/info/v2"
	"github.com/google/cadvisor/manager"
	"github.com/google/cadvisor/metrics"
	"github.com/google/cadvisor/utils/sysfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// What the project's command does not collect unless it is told to.
const disabledByDefault = "advtcp,cpu_topology,cpuset,hugetlb,memory_numa,process,referenced_memory,resctrl,sched,tcp,udp"

func main() {
	var disabled, enabled container.MetricSet
	if err := disabled.Set(disabledByDefault); err != nil {
		log.Fatal(err)
	}
	listen := flag.String("listen", "127.0.0.1:8080", "address to serve /metrics at")
	prefixes := flag.String("raw_cgroup_prefix_whitelist", "", "cgroup paths to collect, by prefix, separated by commas")
	stored := flag.Duration("storage_duration", 2*time.Minute, "how long to keep samples")
	flag.Var(&enabled, "enable_metrics", "kinds of metrics to collect, instead of the project's default")
	klog.InitFlags(nil)
	flag.Parse()

	included := container.AllMetrics.Difference(disabled)
	if len(enabled) > 0 {
		included = enabled
	}
	containers, err := manager.New(
		memory.New(*stored, nil), sysfs.NewRealSysFs(), manager.HousekeepingConfigFlags, included,
		http.DefaultClient, strings.Split(*prefixes, ","), nil, "", 0,
	)
	if err != nil {
		log.Fatal(err)
	}
	if err := containers.Start(); err != nil {
		log.Fatal(err)
	}

	// As the project's handler does: a registry for each scrape, with the process and the Go runtime beside the containers.
	process := collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})
	runtime := collectors.NewGoCollector()
	last := v2.RequestOptions{IdType: v2.TypeName, Count: 1, Recursive: true}
	http.HandleFunc("/metrics", func(w http.ResponseWriter, r *http.Request) {
		registry := prometheus.NewRegistry()
		registry.MustRegister(
			metrics.NewPrometheusCollector(containers, metrics.DefaultContainerLabels, included, clock.RealClock{}, last),
			metrics.NewPrometheusMachineCollector(containers, included),
			process, runtime,
		)
		promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}).ServeHTTP(w, r)
	})
	log.Fatal(http.ListenAndServe(*listen, nil))
}
