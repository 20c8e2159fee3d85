// Command client runs Katalyst's own Malachite provisioners, unchanged, and prints everything they stored.
//
// It asks localhost:9002, which is compiled into the client, every -interval for -rounds rounds, for the pods named by -pod
// UID/CONTAINER-ID (repeatable) and for the cgroup paths named by -path, and writes one JSON object to standard output.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"time"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubewharf/katalyst-core/pkg/config/agent/global"
	"github.com/kubewharf/katalyst-core/pkg/metaserver/agent/metric/provisioner/malachite"
	"github.com/kubewharf/katalyst-core/pkg/metaserver/agent/pod"
	"github.com/kubewharf/katalyst-core/pkg/metrics"
	"github.com/kubewharf/katalyst-core/pkg/util/machine"
	utilmetric "github.com/kubewharf/katalyst-core/pkg/util/metric"
)

type values []string

func (v *values) String() string     { return strings.Join(*v, " ") }
func (v *values) Set(s string) error { *v = append(*v, s); return nil }

func main() {
	var pods, paths values
	flag.Var(&pods, "pod", "UID/CONTAINER-ID of a pod with one container")
	flag.Var(&paths, "path", "cgroup path below the root of the hierarchy")
	reclaim := flag.String("reclaim", "/kubepods/besteffort", "root of reclaimed pods")
	rounds := flag.Int("rounds", 3, "how often to ask")
	interval := flag.Duration("interval", 5*time.Second, "how long to wait in between")
	flag.Parse()

	store := utilmetric.NewMetricStore()
	conf := global.NewBaseConfiguration()
	conf.ReclaimRelativeRootCgroupPath = *reclaim
	conf.GeneralRelativeCgroupPaths = paths
	fetcher, info := &pod.PodFetcherStub{PodList: podList(pods)}, &machine.KatalystMachineInfo{CPUTopology: &machine.CPUTopology{}}
	provisioner := malachite.NewMalachiteMetricsProvisioner(conf, nil, metrics.DummyMetrics{}, fetcher, store, info)
	frequency := malachite.NewRealtimeFreqMetricsProvisioner(conf, nil, metrics.DummyMetrics{}, fetcher, store, info)
	for round := 0; round < *rounds; round++ {
		if round > 0 {
			time.Sleep(*interval)
		}
		provisioner.Run(context.Background())
		frequency.Run(context.Background())
	}
	if err := json.NewEncoder(os.Stdout).Encode(everything(store)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// podList makes pods as the kubelet shows them, each with one running container named c.
func podList(names []string) []*v1.Pod {
	var list []*v1.Pod
	for _, name := range names {
		uid, id, _ := strings.Cut(name, "/")
		list = append(list, &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: uid, Namespace: "default", UID: types.UID(uid)},
			Spec:       v1.PodSpec{Containers: []v1.Container{{Name: "c"}}},
			Status: v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{
				{Name: "c", ContainerID: "containerd://" + id},
			}},
		})
	}
	return list
}

// everything reads the store's maps by their names; there is no other way to list what is in it.
func everything(store *utilmetric.MetricStore) map[string]any {
	found := map[string]any{}
	fields := reflect.ValueOf(store).Elem()
	for i := 0; i < fields.NumField(); i++ {
		field := fields.Field(i)
		if field.Kind() == reflect.Map {
			name := fields.Type().Field(i).Name
			found[name] = plain(reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem())
		}
	}
	return found
}

// plain turns nested maps into what JSON can show; of a metric it keeps the value and the second it is of.
func plain(value reflect.Value) any {
	if value.Kind() != reflect.Map {
		if data, ok := value.Interface().(utilmetric.MetricData); ok {
			shown := map[string]any{"value": fmt.Sprintf("%v", data.Value)}
			if data.Time != nil {
				shown["time"] = data.Time.Unix()
			}
			return shown
		}
		return value.Interface()
	}
	found := map[string]any{}
	for entries := value.MapRange(); entries.Next(); {
		found[fmt.Sprint(entries.Key().Interface())] = plain(entries.Value())
	}
	return found
}
